"""What a machine without a GPU cannot tell: whether the kernels are right on one, and how fast.

    python scripts/gpu_check.py                          # about five minutes
    python scripts/gpu_check.py --quick --json out.json

Four tables: errors of every kernel against NumPy in float64; the share of the bandwidth of a copy,
measured in the same run, that a decode step of one layer reaches; prompts beside cuDNN's attention,
which collects nothing; and tokens per second of whole models. Exits with 1 if a kernel is wrong.

`--platform cpu` runs all of it in miniature with the plain versions, to check this script.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from gpu_numbers import check_numbers
from jax import lax
from rich.console import Console
from rich.table import Table

import jaxkv
from jaxkv import ColumnSums, loops
from jaxkv.buckets import slot_bucket
from jaxkv.models.llama import Llama, LlamaConfig
from jaxkv.models.params import random_params
from jaxkv.pallas_kernels.decode import decode
from jaxkv.pallas_kernels.prompt import prompt
from jaxkv.policies import get
from jaxkv.sampling import sampling

#: One layer of Llama-3-8B.
LAYER = {"kv_heads": 8, "group": 4, "dim": 128}
SMALL_LAYER = {"kv_heads": 2, "group": 2, "dim": 16}
LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
MINIATURE = LLAMA_3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def timed(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of a call, after one that compiles."""
    jax.block_until_ready(run())
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def chosen(operation: str) -> str:
    """What ran an operation in the program that was traced last."""
    choices = jaxkv.kernels()[operation]
    return choices[jax.default_backend()].name


# ------------------------------------------------------------------------------------ bandwidth


def copy_bandwidth(nbytes: int, times: int = 10) -> float:
    """Bytes per second, read and written, of adding 1 to a large array in place."""
    add = jax.jit(lambda x: lax.fori_loop(0, times, lambda _, x: x + 1, x), donate_argnums=0)
    state = {"array": jnp.zeros(nbytes // 4, jnp.float32)}

    def run() -> Any:
        state["array"] = add(state["array"])
        return state["array"]

    return 2 * nbytes * times / timed(run)


def step_bandwidth(batch: int, slots: int, name: str, layer: dict[str, int], enough: int) -> dict:
    """One decode step over the caches of some layers.

    Bytes are those of keys, values and positions, read once, and of scores, read and written. There
    are layers enough for `enough` bytes: more than the GPU's own caches hold.
    """
    kv_heads, group, dim = layer["kv_heads"], layer["group"], layer["dim"]
    per_layer = batch * kv_heads * slots * (2 * 2 * dim + 4 + 8)
    layers = min(32, -(-enough // per_layer))
    steps = max(2, min(200, 200 * enough // (layers * per_layer)))
    key = jax.random.key(0)

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    shape = (batch, kv_heads, slots)
    caches = [
        (normal(*shape, dim), normal(batch, kv_heads, dim, slots), jnp.zeros(shape, jnp.float32))
        for _ in range(layers)
    ]
    positions = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), shape)
    free = jnp.full((batch, kv_heads), slots - 1, jnp.int32)
    position = jnp.full((batch,), slots - 1, jnp.int32)
    fresh = normal(batch, kv_heads, dim)

    def step(_: Any, carry: Any) -> Any:
        caches, q = carry
        changed = []
        for keys, values, scores in caches:
            q, keys, values, (scores,), _ = decode(
                q, fresh, fresh, keys, values, positions, free, position, scores, jnp.int32(0),
                statistics=(ColumnSums(),), window=None,
            )  # fmt: skip
            changed.append((keys, values, scores))
        return changed, q

    run_steps = jax.jit(
        lambda caches, q: lax.fori_loop(0, steps, step, (caches, q)), donate_argnums=0
    )
    state = {"caches": caches}
    q = normal(batch, kv_heads * group, dim)

    def run() -> Any:
        state["caches"], out = run_steps(state["caches"], q)
        return out

    with jaxkv.use_kernels(name):
        took = timed(run) / steps / layers
    return {
        "batch": batch,
        "slots": slots,
        "kernels": chosen("decode"),
        "layers": layers,
        "us_per_layer": 1e6 * took,
        "gb_per_s": per_layer / took / 1e9,
    }


def measure_bandwidth(cells: list[tuple], layer: dict[str, int], enough: int) -> list[dict]:
    copy = copy_bandwidth(8 * enough)
    records = []
    for batch, slots in cells:
        for name in ("auto", "plain"):
            record = step_bandwidth(batch, slots, name, layer, enough)
            record |= {"copy_gb_per_s": copy / 1e9, "share": record["gb_per_s"] * 1e9 / copy}
            records.append(record)
    return records


# -------------------------------------------------------------------------------------- prompts


def measure_prompts(lengths: list[int], layer: dict[str, int]) -> list[dict]:
    kv_heads, group, dim = layer["kv_heads"], layer["group"], layer["dim"]
    records = []
    for t in lengths:
        key = jax.random.key(0)
        queries = jax.random.normal(key, (1, kv_heads, group, t, dim), jnp.bfloat16)
        keys = jax.random.normal(key, (1, kv_heads, t, dim), jnp.bfloat16)
        values = jax.random.normal(key, (1, kv_heads, dim, t), jnp.bfloat16)
        new = jnp.arange(t, dtype=jnp.int32)[None]
        positions = jnp.broadcast_to(new, (1, kv_heads, t))

        def attend(*arrays: Any, asked: tuple = ()) -> Any:
            return prompt(*arrays, window=None, statistics=asked, layer=jnp.int32(0), far=None)

        def cudnn(q: Any, k: Any, v: Any) -> Any:
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

        in_rows = [
            jnp.moveaxis(queries.reshape(1, -1, t, dim), 1, 2),
            jnp.moveaxis(keys, 1, 2),
            jnp.moveaxis(values, 3, 1),
        ]
        block = [queries, new, keys, values, positions]
        sums = functools.partial(attend, asked=(ColumnSums(),))
        ways: list[tuple[str, str, Callable, list]] = [
            ("attention", "auto", attend, block),
            ("attention and column sums", "auto", sums, block),
            ("attention and column sums", "plain", sums, block),
            ("attention by cuDNN", "auto", cudnn, in_rows),
        ]
        # The lower triangle: two products of 2 flops.
        flops = 2 * t * t * kv_heads * group * dim
        for what, name, function, arrays in ways:
            if name == "plain" and t > 10_000:
                continue
            record = {"tokens": t, "what": what, "kernels": name}
            try:
                with jaxkv.use_kernels(name):
                    took = timed(functools.partial(jax.jit(function), *arrays), 3)
            except (RuntimeError, ValueError, NotImplementedError) as refusal:
                # cuDNN is of no use to CPUs, and asks for some versions of itself.
                record["refused"] = str(refusal).splitlines()[0]
            else:
                record |= {"ms": 1e3 * took, "tflop_per_s_of_attention": flops / took / 1e12}
            records.append(record)
    return records


# --------------------------------------------------------------------------------------- models


def decoding(
    params: jaxkv.Params, batch: int, slots: int, policy: jaxkv.Policy, steps: int
) -> float:
    """Seconds of a decode step while caches are as full as can be."""
    # A cache that only grows needs room for the tokens of all runs.
    held = slots - 1 if policy.evicts else slots - 6 * steps
    state = {"loop": full_loop(params, policy, batch, slots, held)}
    options, eos = sampling(), jnp.array([-1], jnp.int32)

    def run() -> Any:
        state["loop"], tokens, _ = loops.decode(
            params, state["loop"], options, eos, jnp.int32(steps), policy
        )
        return tokens

    return timed(run) / steps


def full_loop(
    params: jaxkv.Params, policy: jaxkv.Policy, batch: int, slots: int, held: int
) -> loops.Loop:
    """A loop whose slots hold `held` tokens with random keys and values, made on the device."""
    layers = params.config.num_layers
    index = jnp.arange(slots, dtype=jnp.int32)

    def filled(layer: jaxkv.LayerCache, key: Any) -> jaxkv.LayerCache:
        positions = jnp.broadcast_to(jnp.where(index < held, index, -1), layer.positions.shape)
        return dataclasses.replace(
            layer,
            keys=jax.random.normal(key, layer.keys.shape, layer.keys.dtype),
            values=jax.random.normal(key, layer.values.shape, layer.values.dtype),
            positions=positions,
            free=jnp.full(layer.free.shape, held, jnp.int32),
        )

    @jax.jit
    def make() -> loops.Loop:
        budgets = jnp.full((layers, batch), slots - 1, jnp.int32)
        cache = loops.empty_cache(params, policy, budgets, [slots] * layers)
        keys = jax.random.split(jax.random.key(0), layers)
        full = tuple(map(filled, cache.layers, keys))
        cache = jaxkv.Cache(full, jnp.full((batch,), held, jnp.int32))
        token = jnp.ones((batch,), jnp.int32)
        keys = jax.random.split(jax.random.key(1), batch)
        return loops.Loop(cache, token, jnp.zeros((batch,), bool), keys, None)

    return make()


def measure_model(name: str, params: jaxkv.Params, quick: bool, small: bool, room: int) -> list:
    """Tokens per second under `full`, and under `h2o` with a fifth of the slots."""
    steps, large = (4, 256) if small else (32, 4096)
    records = []
    for batch in (1,) if quick else (1, 2 if small else 32):
        for slots, policy, kernels in (
            (large, "full", "auto"),
            (slot_bucket(large // 5), "h2o", "auto"),
            (slot_bucket(large // 5), "h2o", "plain"),
        )[: 2 if small else 3]:
            config = params.config
            of_slot = 2 * params.dtype.itemsize * config.num_kv_heads * config.head_dim
            cache_bytes = batch * slots * config.num_layers * of_slot
            record = {"model": name, "batch": batch, "slots": slots, "policy": policy}
            record |= {"cache_gb": cache_bytes / 1e9}
            if 1.2 * cache_bytes > room - params.nbytes:
                records.append(record | {"refused": "the GPU has too little memory"})
                continue
            with jaxkv.use_kernels(kernels):
                budget = None if policy == "full" else slots - 1
                took = decoding(params, batch, slots, get(policy, budget), steps)
            record |= {"kernels": chosen("decode"), "ms": 1e3 * took, "tokens_per_s": batch / took}
            records.append(record)
    return records


def measure_models(model: str, quick: bool, small: bool, room: int) -> list[dict]:
    records = []
    try:
        records += measure_model(model, jaxkv.load(model), quick, small, room)
    except (jaxkv.DownloadError, jaxkv.CheckpointError) as missing:
        records.append({"model": model, "refused": str(missing).splitlines()[0]})
    config = LlamaConfig.from_hf(MINIATURE if small else LLAMA_3_8B)
    name = "random, miniature" if small else "random, Llama-3-8B"
    if not small and room < 17e9:
        return [*records, {"model": name, "refused": "the GPU has too little memory"}]
    params = jax.jit(functools.partial(random_params, Llama, config, dtype=jnp.bfloat16))()
    return records + measure_model(name, params, quick, small, room)


# ----------------------------------------------------------------------------------------- main


def show(title: str, records: list[dict]) -> None:
    columns = list(dict.fromkeys(key for record in records for key in record))
    table = Table(*columns, title=title)

    def told(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)

    for record in records:
        table.add_row(*(told(record.get(column)) for column in columns))
    Console(width=160).print(table)


def device(platform: str) -> jax.Device:
    """The device to check; without one, the program ends with a message."""
    try:
        return jax.local_devices(backend=platform)[0]
    except RuntimeError as error:
        sys.exit(f"no GPU that JAX can use: {str(error).splitlines()[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="name or folder of a small model")
    parser.add_argument("--json", type=Path, help="write all tables")
    parser.add_argument("--quick", action="store_true", help="fewer cells, two minutes")
    parser.add_argument("--platform", choices=["gpu", "cpu"], default="gpu")
    args = parser.parse_args()
    small = args.platform == "cpu"
    if small:
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
    found = device(args.platform)
    memory = 10**9 if small else int(found.memory_stats()["bytes_limit"] * 0.9)
    start = time.perf_counter()
    tables: dict[str, list[dict]] = {}

    def add(title: str, records: list[dict]) -> None:
        tables[title] = records
        show(title, records)

    add("errors against float64", check_numbers(chosen, plain=small))
    layer = SMALL_LAYER if small else LAYER
    enough = 2**16 if small else 2**28
    sizes = (64, 256) if small else (1024, 8192) if args.quick else (1024, 8192, 32768)
    batches = (1, 2) if small else (1, 8, 64)
    cells = [(batch, slots) for batch in batches for slots in sizes]
    add("decode, one layer", measure_bandwidth(cells, layer, enough))
    lengths = [128] if small else [8192] if args.quick else [8192, 32768]
    add("prompt, one layer", measure_prompts(lengths, layer))
    add("decoding", measure_models(args.model, args.quick, small, memory))

    summary = {
        "device": found.device_kind,
        "jax": jax.__version__,
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps(summary))
    if args.json:
        args.json.write_text(json.dumps({"summary": summary, "tables": tables}, indent=1) + "\n")
    wrong = [record for record in tables["errors against float64"] if not record["right"]]
    if wrong:
        sys.exit(f"{len(wrong)} of the kernels' results are wrong, see the first table")


if __name__ == "__main__":
    main()
