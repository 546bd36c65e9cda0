"""Errors of the kernels on this machine's device, against NumPy in float64: for `gpu_check.py`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import ColumnSums
from jaxkv.pallas_kernels.decode import decode
from jaxkv.pallas_kernels.decode_shared import decode_shared
from jaxkv.pallas_kernels.prompt import prompt
from jaxkv.shared import Sharing

STEP_CASES = [
    # dtype, batch, KV heads, query heads of each, head dim, slots, statistic, window
    ("float32", 3, 3, 3, 64, 1000, ColumnSums(), None),
    ("float32", 2, 2, 16, 128, 4096, ColumnSums("max"), 300),
    ("bfloat16", 3, 3, 3, 64, 832, ColumnSums(), None),
    ("bfloat16", 2, 8, 4, 128, 8192, ColumnSums("mean", power=0.5), None),
    ("bfloat16", 3, 2, 8, 128, 1111, ColumnSums("max", power=2.0), 500),
    ("bfloat16", 2, 2, 1, 80, 640, ColumnSums(), None),
    ("bfloat16", 2, 2, 4, 256, 2048, None, None),
    ("float16", 2, 4, 4, 96, 2048, ColumnSums(), None),
]
PROMPT_CASES = [
    # dtype, KV heads, query heads of each, head dim, new tokens, stored slots, statistic, window
    ("float32", 2, 3, 64, 500, 0, ColumnSums(), None),
    ("float32", 1, 2, 128, 300, 200, ColumnSums("max", last=32), None),
    ("bfloat16", 2, 3, 64, 1024, 0, ColumnSums(), None),
    ("bfloat16", 2, 4, 128, 1024, 0, ColumnSums("mean", power=0.5), None),
    ("bfloat16", 2, 2, 128, 777, 333, ColumnSums(last=64), 256),
    ("bfloat16", 1, 2, 80, 640, 0, ColumnSums("max"), 100),
    ("bfloat16", 1, 2, 256, 512, 128, None, None),
    ("float16", 2, 2, 96, 512, 0, ColumnSums(), None),
]
SHARED_CASES = [
    # dtype, batch, KV heads, query heads of each, head dim, slots, first and latest tokens that are
    # near, whether heads may skip, window
    ("float32", 3, 2, 3, 64, 1000, (4, 124), False, None),
    ("float32", 2, 2, 4, 128, 4096, (16, 1008), True, 3000),
    ("bfloat16", 2, 8, 4, 128, 8192, (16, 4080), False, None),
    ("bfloat16", 3, 2, 8, 128, 1111, (16, 240), True, None),
    ("float16", 2, 4, 1, 96, 2048, (0, 200), True, 1500),
]
#: Largest error of an output beside the largest output, and of a statistic beside the largest one.
LIMITS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
STATISTIC_LIMIT = 1e-4


def in_float64(
    queries: np.ndarray,
    query_positions: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    key_positions: np.ndarray,
    statistic: ColumnSums | None,
    window: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of queries `[b, k, g, t, d]` over keys `[b, k, s, d]`, and what keys received."""
    q, k, v = (np.nan_to_num(np.asarray(x, np.float64)) for x in (queries, keys, values))
    rows, columns = query_positions[:, None, :, None], key_positions[:, :, None, :]
    seen = (columns >= 0) & (columns <= rows)
    if window is not None:
        seen &= rows - columns < window
    seen = seen[:, :, None]
    logits = np.einsum("bkgtd,bksd->bkgts", q, k) * q.shape[-1] ** -0.5
    logits = np.where(seen, logits, -np.inf)
    weights = np.exp(logits - np.maximum(np.max(logits, -1, keepdims=True), -1e30))
    shares = weights / np.maximum(np.sum(weights, -1, keepdims=True), 1e-300)
    out = np.einsum("bkgts,bkds->bkgtd", shares, v)
    if statistic is None:
        return out, np.zeros(0)
    if statistic.last is not None:
        newest = np.max(query_positions, 1)[:, None]
        counts = query_positions > newest - statistic.last
        shares = shares * counts[:, None, None, :, None]
    reduce = {"sum": np.sum, "mean": np.mean, "max": np.max}[statistic.group]
    return out, np.sum(reduce(shares**statistic.power, 2), 2)


def step_arguments(
    dtype: str, batch: int, kv_heads: int, group: int, dim: int, slots: int, waste: float
) -> list[Any]:
    """Sequences with a full cache; half the slots of the last one are empty and hold `waste`."""
    rng = np.random.default_rng(slots)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    positions = rng.permuted(np.tile(np.arange(slots), (batch, kv_heads, 1)), axis=-1)
    positions[-1] = np.where(positions[-1] < slots // 2, positions[-1], -1)
    free = rng.integers(0, slots, (batch, kv_heads))
    position = np.full(batch, slots)
    np.put_along_axis(positions, free[..., None], slots, -1)
    keys, values = normal(batch, kv_heads, slots, dim), normal(batch, kv_heads, dim, slots)
    keys[positions < 0] = waste
    np.moveaxis(values, 2, 3)[positions < 0] = waste
    return [
        normal(batch, kv_heads * group, dim),
        normal(batch, kv_heads, dim),
        normal(batch, kv_heads, dim),
        keys,
        values,
        positions.astype(np.int32),
        free.astype(np.int32),
        position.astype(np.int32),
        rng.random((batch, kv_heads, slots), np.float32),
        np.int32(0),
    ]


def step_errors(case: tuple, waste: float) -> tuple[float, float]:
    """Errors of output and statistic of a decode step, infinite if it writes a wrong cache."""
    dtype, batch, kv_heads, group, dim, slots, statistic, window = case
    arguments = step_arguments(dtype, batch, kv_heads, group, dim, slots, waste)
    queries, key, value, keys, values, positions, free, position, scores, _ = arguments
    if statistic is None:
        arguments[8] = None
    asked = () if statistic is None else (statistic,)
    run = jax.jit(functools.partial(decode, statistics=asked, window=window))
    out, new_keys, new_values, received, _ = run(*arguments)
    at = (np.arange(batch)[:, None], np.arange(kv_heads)[None], free)
    keys[at], np.moveaxis(values, 2, 3)[at] = key, value
    # Bit by bit: NaN where there was NaN, too.
    if np.asarray(new_keys).tobytes() != keys.tobytes():
        return float("inf"), float("inf")
    if np.asarray(new_values).tobytes() != values.tobytes():
        return float("inf"), float("inf")
    grouped = queries.reshape(batch, kv_heads, group, 1, dim)
    wanted, wanted_received = in_float64(
        grouped, position[:, None], keys, values, positions, statistic, window
    )
    if statistic is not None:
        wanted_received = wanted_received + scores
    return error(out, wanted.reshape(out.shape)), error(*received, wanted_received)


def shared_errors(case: tuple, waste: float) -> tuple[float, float]:
    """The error of a step of heads that share distant keys, infinite if it writes a wrong cache or
    skips otherwise than it should. The last sequence has half as many tokens.
    """
    dtype, batch, kv_heads, group, dim, slots, (sinks, recent), skips, window = case
    sharing = Sharing(((0,), (0,)), sinks, recent, ("predicted", 0.5) if skips else None)
    rng = np.random.default_rng(slots)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    length = np.full(batch, slots - 1)
    length[-1] = max(slots // 2, sharing.near + 1)
    position = (length - 1).astype(np.int32)
    positions = np.where(np.arange(slots) < length[:, None], np.arange(slots), -1)
    positions = np.repeat(positions[:, None], kv_heads, 1).astype(np.int32)
    held = np.asarray(sharing.seated(jnp.array(position), sharing.near))
    seat = np.asarray(sharing.seats(jnp.array(position)))
    ring = np.repeat(held[:, None], kv_heads, 1).astype(np.int32)
    free = np.repeat(position[:, None], kv_heads, 1)
    queries, far_queries = normal(2, batch, kv_heads * group, dim)
    key, value = normal(2, batch, kv_heads, dim)
    near_keys, keys = (
        normal(batch, kv_heads, sharing.near, dim),
        normal(batch, kv_heads, slots, dim),
    )
    values = normal(batch, kv_heads, dim, slots)
    keys[positions < 0] = waste
    np.moveaxis(values, 2, 3)[positions < 0] = waste
    # Nothing of the first KV head is far away, as its root says, and nearly all of the others.
    root_far = np.where(np.arange(kv_heads)[:, None] == 0, -20, 20) + np.zeros((batch, 1, group))
    run = jax.jit(functools.partial(decode_shared, sharing=sharing, window=window))
    out, new_ring, new_values, counts = run(
        *(queries, far_queries, key, value, near_keys, values, keys, positions, ring, free),
        *(position, root_far.astype(np.float32)),
    )
    rows = np.arange(batch)
    near_keys[rows, :, seat], values[rows, :, :, position] = key, value
    skipped = np.zeros((batch, kv_heads), bool)
    skipped[:, 0] = skips
    right = np.asarray(new_ring).tobytes() == near_keys.tobytes()
    right &= np.asarray(new_values).tobytes() == values.tobytes()
    if skips:
        right &= bool(np.all(np.asarray(counts) == np.stack([skipped, np.ones_like(skipped)], -1)))
    if not right:
        return float("inf"), 0.0

    def wide(x: np.ndarray) -> np.ndarray:
        return np.nan_to_num(np.asarray(x, np.float64))

    grouped = (wide(x).reshape(batch, kv_heads, group, dim) for x in (queries, far_queries))
    logits, far = (
        np.einsum("bkgd,bksd->bkgs", q, wide(k))
        for q, k in zip(grouped, (near_keys, keys), strict=True)
    )
    distance = position[:, None, None] - positions
    near = (positions < sinks) | (distance < recent)
    at = np.clip(np.asarray(sharing.seats(jnp.array(positions))), 0, sharing.near - 1)
    logits = np.take_along_axis(logits, np.repeat(at[:, :, None], group, 2), -1)
    logits = np.where(near[:, :, None], logits, far) * dim**-0.5
    seen = (positions >= 0) & (near | ~skipped[..., None])
    if window is not None:
        seen &= distance < window
    weights = np.where(seen[:, :, None], np.exp(logits - logits.max(-1, keepdims=True)), 0)
    wanted = np.einsum("bkgs,bkds->bkgd", weights, wide(values)) / weights.sum(-1)[..., None]
    return error(out, wanted.reshape(out.shape)), 0.0


def prompt_errors(case: tuple, waste: float) -> tuple[float, float]:
    """Errors of output and statistic of a block of new tokens, the second sequence's padded."""
    dtype, kv_heads, group, dim, t, before, statistic, window = case
    rng = np.random.default_rng(t)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))

    stored = rng.permuted(np.tile(np.arange(before), (2, kv_heads, 1)), axis=-1)
    stored = np.where(stored % 5 == 0, -1, stored)
    new = np.where(np.arange(t) < np.array([[t], [t - t // 3]]), before + np.arange(t), -1)
    positions = np.concatenate([stored, np.repeat(new[:, None], kv_heads, 1)], 2).astype(np.int32)
    keys = normal(2, kv_heads, before + t, dim)
    values = normal(2, kv_heads, dim, before + t)
    empty = (positions < 0) & (np.arange(before + t) < before)
    keys[empty] = waste
    np.moveaxis(values, 2, 3)[empty] = waste
    queries = normal(2, kv_heads, group, t, dim)
    new = new.astype(np.int32)
    asked = () if statistic is None else (statistic,)
    run = jax.jit(
        functools.partial(prompt, statistics=asked, window=window, layer=jnp.int32(0), far=None)
    )
    out, received = run(queries, new, keys, values, positions)
    wanted, wanted_received = in_float64(queries, new, keys, values, positions, statistic, window)
    real = (new >= 0)[:, None, None, :, None]
    found = np.where(real, np.asarray(out, np.float64), 0)
    return error(found, wanted), error(*received, wanted_received)


def error(*found_and_wanted: Any) -> float:
    """The largest error beside the largest value; 0 if nothing was asked for."""
    *found, wanted = found_and_wanted
    if not found:
        return 0.0
    error = np.max(np.abs(np.asarray(found[0], np.float64) - wanted)) / np.max(np.abs(wanted))
    return float("inf") if np.isnan(error) else float(error)


def check_numbers(chosen: Callable[[str], str], *, plain: bool) -> list[dict]:
    """A record for each case; `chosen` tells what ran an operation.

    `plain`: the plain versions are checked instead, in few cases, and none with NaN, which they
    would give back.
    """
    waste, expected = (0.0, "plain") if plain else (np.nan, "triton")
    records = []
    for name, cases, errors in (
        ("decode", STEP_CASES, step_errors),
        ("prompt", PROMPT_CASES, prompt_errors),
        ("decode_shared", SHARED_CASES, shared_errors),
    ):
        for case in cases[:2] if plain else cases:
            dtype, *sizes, statistic, window = case
            of_output, of_statistic = errors(case, waste)
            right = of_output <= LIMITS[dtype] and of_statistic <= STATISTIC_LIMIT
            records.append(
                {
                    "operation": name,
                    "dtype": dtype,
                    "sizes": " ".join(map(str, sizes)),
                    "statistic": repr(statistic) if isinstance(statistic, ColumnSums) else "",
                    "window": window,
                    "kernels": chosen(name),
                    "error": of_output,
                    "statistic_error": of_statistic,
                    "right": right and chosen(name) == expected,
                }
            )
    return records
