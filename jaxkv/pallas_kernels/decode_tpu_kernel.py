"""The kernel of `decode_tpu`: what is done with one block of keys and values in VMEM."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv.shared import Sharing
from jaxkv.statistics import ColumnSums

MASKED = -1e30
LANES = 128


def kernel(
    free_ref,  # SMEM [batch, kv_heads] int32
    position_ref,  # SMEM [batch] int32
    *refs,
    sums: ColumnSums | None,
    window: int | None,
    slots: int,
    block: int,
    slots_last: bool,
    sharing: Sharing | None,
    far: Sharing | None,
):
    """One block of one KV head."""
    given: Any = iter(refs)
    none: Any = None
    reads_ref = none if sharing is None else next(given)  # SMEM [2 * steps] int32
    queries_ref = next(given)  # [group, dim]
    key_ref, value_ref = next(given), next(given)  # [1, dim], of the new token
    keys_ref = next(given)  # [dim, block], or [block, dim] where slots are rows
    values_ref = next(given)  # [dim, block]
    positions_ref = next(given)  # [1, blocks * block] int32
    far_queries_ref, near_ref = queries_ref, none
    if sharing is not None:
        far_queries_ref, near_ref = next(given), next(given)  # [group, dim], [group, block]
    onto_ref = none if sums is None else next(given)  # [1, slots]
    out_ref = next(given)  # [group, dim]
    key_tile_ref = next(given) if sharing is None else none
    value_tile_ref = next(given)
    received_ref = none if sums is None else next(given)  # [1, slots]
    told_ref = none if far is None else next(given)  # [group, 128]
    # Scratch: logits of all blocks; output, maximum and sum of each query head in the making; the
    # latter two of distant logits as well.
    logits_ref, acc_ref, high_ref, sum_ref, *far_refs = given
    b, k, j = (pl.program_id(axis) for axis in range(3))
    batch, kv_heads, blocks = (pl.num_programs(axis) for axis in range(3))
    step = (b * kv_heads + k) * blocks + j
    free, position = free_ref[b, k], position_ref[b]
    queries, key, value = queries_ref[...], key_ref[...], value_ref[...]
    scale = queries.shape[1] ** -0.5
    # Mosaic would round float32 to bfloat16.
    exact = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else lax.Precision.DEFAULT

    def dot(a, b, contract):
        return lax.dot_general(
            a,
            b,
            ((contract[:1], contract[1:]), ((), ())),
            precision=exact,
            preferred_element_type=jnp.float32,
        )

    # What the new token gets is known at once; its slot still holds another.
    fresh = jnp.sum(queries.astype(jnp.float32) * key.astype(jnp.float32), 1, keepdims=True)
    fresh = fresh * scale

    @pl.when(j == 0)
    def _start():
        high_ref[...] = jnp.broadcast_to(fresh, high_ref.shape)
        sum_ref[...] = jnp.ones(sum_ref.shape, jnp.float32)
        acc_ref[...] = jnp.broadcast_to(value.astype(jnp.float32), acc_ref.shape)
        if far is not None:
            far_refs[0][...] = jnp.full(high_ref.shape, MASKED, jnp.float32)
            far_refs[1][...] = jnp.zeros(sum_ref.shape, jnp.float32)

    @pl.when(j == free // block)
    def _write():
        here = free // block * block
        first = pl.multiple_of(free // LANES * LANES - here, LANES)
        at = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) == free % LANES
        value_tile_ref[...] = jnp.where(at, column(value), values_ref[:, pl.ds(first, LANES)])
        if key_tile_ref is None:
            return
        if slots_last:
            key_tile_ref[...] = jnp.where(at, column(key), keys_ref[:, pl.ds(first, LANES)])
        else:
            tall = key_tile_ref.shape[0]
            first = pl.multiple_of(free // tall * tall - here, tall)
            at = lax.broadcasted_iota(jnp.int32, (tall, 1), 0) == free % tall
            key_tile_ref[...] = jnp.where(at, key, keys_ref[pl.ds(first, tall), :])

    # Another step's block has no slot that is seen here.
    @pl.when(True if sharing is None else reads_ref[batch * kv_heads * blocks + step] == step)
    def _meet():
        start = pl.multiple_of(j * block, LANES)
        positions = positions_ref[:, pl.ds(start, block)]
        slot = start + lax.broadcasted_iota(jnp.int32, (1, block), 1)
        seen = (positions >= 0) & (positions <= position) & (slot != free)
        if window is not None:
            seen &= position - positions < window
        keys = keys_ref[...]
        logits = dot(far_queries_ref[...], keys, (1, 0) if slots_last else (1, 1)) * scale
        if sharing is not None:
            near = sharing.is_near(position, positions)
            logits = jnp.where(near, near_ref[...], logits)
        logits = jnp.where(seen, logits, MASKED)
        if sums is not None:
            logits_ref[j] = logits
        rescale, weights = weigh(logits, high_ref, sum_ref)
        # Slots that are not seen may hold anything, and 0 * NaN is NaN.
        values = jnp.where(seen, values_ref[...], jnp.zeros((), values_ref.dtype))
        acc_ref[...] = acc_ref[...] * rescale + dot(weights.astype(values.dtype), values, (1, 1))
        if far is not None:
            distant = seen & ~far.is_near(position, positions)
            weigh(jnp.where(distant, logits, MASKED), *far_refs)

    @pl.when(j == blocks - 1)
    def _finish():
        # A sequence that has ended sees nothing.
        share = jnp.where(position >= 0, 1 / sum_ref[:, :1], 0.0)
        out_ref[...] = (acc_ref[...] * share).astype(out_ref.dtype)
        if told_ref is not None:
            high, total = (ref[...] for ref in far_refs)
            told_ref[...] = high + jnp.log(total)
        if sums is None:
            return

        def add(number, first, width):
            at = lax.broadcasted_iota(jnp.int32, (1, width), 1) + first == free
            logits = jnp.where(at, fresh, logits_ref[number][:, :width])
            received = of_group(sums, jnp.exp(logits - high_ref[:, :1]) * share)[None]
            received_ref[:, pl.ds(first, width)] = onto_ref[:, pl.ds(first, width)] + received

        if slots >= block:

            @pl.loop(0, slots // block)
            def _blocks(number):
                add(number, pl.multiple_of(number * block, LANES), block)

        if slots % block:
            add(slots // block, slots // block * block, slots % block)


def weigh(logits, high_ref, sum_ref):
    """The exponentials of a block of logits, and by how much those before them shrink; keeps the
    running maximum and sum `[group, 128]`.
    """
    high = high_ref[:, :1]
    higher = jnp.maximum(high, jnp.max(logits, 1, keepdims=True))
    rescale, weights = jnp.exp(high - higher), jnp.exp(logits - higher)
    sum_ref[...] = sum_ref[...] * rescale + jnp.sum(weights, 1, keepdims=True)
    high_ref[...] = jnp.broadcast_to(higher, high_ref.shape)
    return rescale, weights


def column(row):
    """[1, dim] as [dim, 1], in sums of one number each."""
    dim = row.shape[1]
    diagonal = lax.broadcasted_iota(jnp.int32, (dim, dim), 0) == lax.broadcasted_iota(
        jnp.int32, (dim, dim), 1
    )
    spread = jnp.where(diagonal, row.astype(jnp.float32), 0.0)
    return jnp.sum(spread, 1, keepdims=True).astype(row.dtype)


def of_group(sums, probabilities):
    """[group, width] as [width], or [group, rows, width] as [rows, width]: query heads put together
    as the statistic says, in a kernel.
    """
    if sums.power == 0.5:
        probabilities = jnp.sqrt(probabilities)
    elif sums.power != 1:
        some = probabilities > 0
        powers = jnp.exp(sums.power * jnp.log(jnp.where(some, probabilities, 1.0)))
        probabilities = jnp.where(some, powers, 0.0)
    if sums.group == "max":
        return jnp.max(probabilities, 0)
    received = jnp.sum(probabilities, 0)
    return received if sums.group == "sum" else received / probabilities.shape[0]
