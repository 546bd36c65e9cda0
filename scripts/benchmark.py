"""Decode steps and prompts, measured against the read bandwidth of this machine in the same run.

    python scripts/benchmark.py                       # the table of README.md
    python scripts/benchmark.py --quick --json out.json
    python scripts/benchmark.py --vs transformers kvpress openvino     # beside peers, see below

A decode step must read the weights and the live cache once; what a plain parallel sum over a
large array reaches is the limit. Every cell runs `--repeats` times, cells taken in turn, and the
median counts; the machine's own drift is in the bandwidth, which is measured before every cell.
With `--vs`, other libraries are installed and measured beside jaxkv instead (`benchmark_peers.py`).
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark_peers
import jax
import jax.numpy as jnp
import numpy as np
from policies_table import python_documentation
from rich.console import Console
from rich.table import Table

import jaxkv
from jaxkv import loops
from jaxkv.buckets import pad_rows, slot_bucket
from jaxkv.compilation import CompileClock
from jaxkv.policies import get
from jaxkv.sampling import sampling

DECODE_CELLS = [
    (batch, slots, policy)
    for batch in (1, 8)
    for slots in (820, 4096)
    for policy in ("full", "h2o")
]
PROMPT_CELLS = [(2048, "full"), (2048, "h2o")]
STEPS = 16
#: Compiled loops that run before a cache that only grows must be made anew.
RUNS = 4
SUM_BYTES = 2**29
MACHINE = {
    "jax": jax.__version__,
    "python": platform.python_version(),
    "cores": os.cpu_count(),
}


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def read_bandwidth() -> Callable[[], float]:
    """A function that measures bytes per second of a parallel sum over a large array."""
    array = jnp.ones(SUM_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()
    return lambda: SUM_BYTES / min(seconds(lambda: total(array)) for _ in range(3))


def full_loop(params: jaxkv.Params, policy: jaxkv.Policy, batch: int, slots: int) -> loops.Loop:
    """A loop whose slots are as full as can be, with random keys and values."""
    layers = params.config.num_layers
    filled = slots - 1 if policy.evicts else slots - RUNS * STEPS
    budgets = jnp.full((layers, batch), slots - 1, jnp.int32)
    cache = loops.empty_cache(params, policy, budgets, [slots] * layers)
    rng = np.random.default_rng(0)

    def fill(layer: jaxkv.LayerCache) -> jaxkv.LayerCache:
        index = jnp.arange(layer.slots)
        held = jnp.where(index < filled, index, -1).astype(jnp.int32)
        return dataclasses.replace(
            layer,
            keys=jnp.asarray(rng.standard_normal(layer.keys.shape, np.float32)),
            values=jnp.asarray(rng.standard_normal(layer.values.shape, np.float32)),
            positions=jnp.broadcast_to(held, layer.positions.shape).copy(),
            free=jnp.full(layer.free.shape, filled, jnp.int32),
        )

    cache = jaxkv.Cache(tuple(map(fill, cache.layers)), jnp.full((batch,), filled, jnp.int32))
    token = jnp.ones((batch,), jnp.int32)
    keys = jax.random.split(jax.random.key(0), batch)
    return loops.Loop(cache, token, jnp.zeros((batch,), bool), keys, None)


def decode_cell(params: jaxkv.Params, batch: int, slots: int, name: str) -> Callable[[], dict]:
    """A function that times a decode step (the mean over a few, in one compiled loop)."""
    policy = get(name, None if name == "full" else slots - 1)
    options, eos = sampling(), jnp.array([-1], jnp.int32)
    state = {"loop": full_loop(params, policy, batch, slots), "left": RUNS}
    cache_bytes = state["loop"].cache.nbytes

    def step() -> float:
        if not state["left"] and not policy.evicts:
            state.update(loop=full_loop(params, policy, batch, slots), left=RUNS)
        state["left"] -= 1

        def run():
            state["loop"], *_ = loops.decode(
                params, state["loop"], options, eos, jnp.int32(STEPS), policy
            )
            return state["loop"].token

        return seconds(run) / STEPS

    clock = CompileClock()
    step()
    compile_seconds = clock.seconds
    return lambda: {
        "ms": 1e3 * step(),
        "bytes": params.nbytes + cache_bytes,
        "cache_mb": cache_bytes / 1e6,
        "compile_s": compile_seconds,
    }


def prompt_cell(
    params: jaxkv.Params, ids: list[int], name: str, kept: int | None = None
) -> Callable[[], dict]:
    """A function that times the reading of a prompt, of which `kept` tokens stay."""
    policy, length = get(name, kept), len(ids)
    tokens, added = pad_rows([ids], length)
    budget = policy.resolve(length) if policy.evicts else length
    layers = params.config.num_layers
    budgets = jnp.full((layers, 1), budget, jnp.int32)
    slots = (slot_bucket(budget + 1),) * layers

    def run():
        return loops.read_first(params, tokens, added, budgets, policy, slots)

    clock = CompileClock()
    jax.block_until_ready(run())
    compile_seconds = clock.seconds
    return lambda: {"ms": 1e3 * seconds(run), "compile_s": compile_seconds}


def random_ids(params: jaxkv.Params, length: int) -> list[int]:
    return np.random.default_rng(0).integers(0, params.config.vocab_size, length).tolist()


def measure(model: str, quick: bool, repeats: int) -> list[dict]:
    params = jaxkv.load(model)
    bandwidth = read_bandwidth()
    cells = [("decode", *cell) for cell in (DECODE_CELLS[:4] if quick else DECODE_CELLS)]
    cells += [("prompt", 1, *cell) for cell in (PROMPT_CELLS[:0] if quick else PROMPT_CELLS)]
    records = []
    # Cells that differ only in the policy are compared: they take turns.
    for case, batch, size in dict.fromkeys(cell[:3] for cell in cells):
        policies = [cell[3] for cell in cells if cell[:3] == (case, batch, size)]
        runs = {
            policy: decode_cell(params, batch, size, policy)
            if case == "decode"
            else prompt_cell(params, random_ids(params, size), policy)
            for policy in policies
        }
        results: dict[str, list[dict]] = {policy: [] for policy in policies}
        for _ in range(repeats):
            for policy, run in runs.items():
                limit = bandwidth()
                result = run()
                if "bytes" in result:
                    result["share"] = result["bytes"] / (result["ms"] / 1e3) / limit
                results[policy].append(result | {"bandwidth": limit})
        for policy, found in results.items():
            median = {key: statistics.median(r[key] for r in found) for key in found[0]}
            records.append(
                {
                    "case": case,
                    "policy": policy,
                    "batch": batch,
                    "slots": size,
                    "ms": round(median["ms"], 2),
                    "share_of_bandwidth": round(median["share"], 3) if "share" in median else None,
                    "bandwidth_gb_s": round(median["bandwidth"] / 1e9, 1),
                    "cache_mb": round(median["cache_mb"], 1) if "cache_mb" in median else None,
                    "compile_s": round(median["compile_s"], 1),
                }
            )
    full = {(r["case"], r["batch"], r["slots"]): r["ms"] for r in records if r["policy"] == "full"}
    for record in records:
        key = (record["case"], record["batch"], record["slots"])
        record["ratio_to_full"] = round(record["ms"] / full[key], 3)
    return records


def cold_start(model: str, warm: bool) -> float:
    """Seconds from an empty process to the first token, with or without compiled programs."""
    code = (
        f"import jaxkv; p = jaxkv.load({model!r}); "
        "next(iter(jaxkv.stream(p, 'Once upon a time', policy='h2o', budget=64)))"
    )
    start = time.perf_counter()
    flags = {} if warm else {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **flags})
    return time.perf_counter() - start


def prompt_memory(model: str, length: int, policy: str) -> float:
    """Peak bytes of a process beyond the weights, during a prompt of `length` tokens (Linux)."""
    code = (
        f"import jaxkv; p = jaxkv.load({model!r}); "
        f"ids = list(range(100, 100 + {length})); "
        f"jaxkv.generate(p, ids, policy={policy!r}, max_new_tokens=2); "
        "peak = next(x for x in open('/proc/self/status') if x.startswith('VmHWM')); "
        "print(int(peak.split()[1]) * 1024 - p.nbytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def show(records: list[dict]) -> None:
    table = Table("case", "batch", "slots", "policy", "ms", "of bandwidth", "vs full", "cache MB")
    for r in records:
        share = r["share_of_bandwidth"]
        table.add_row(
            r["case"],
            str(r["batch"]),
            str(r["slots"]),
            r["policy"],
            f"{r['ms']:.1f}",
            "" if share is None else f"{share:.0%} of {r['bandwidth_gb_s']:.1f} GB/s",
            f"{r['ratio_to_full']:.2f}",
            "" if r["cache_mb"] is None else f"{r['cache_mb']:.0f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", type=Path, help="write one record per cell")
    parser.add_argument("--quick", action="store_true", help="batch 1 only, two minutes")
    parser.add_argument("--repeats", type=int, help="default: 5, of peers 3")
    parser.add_argument(
        "--vs",
        nargs="+",
        choices=benchmark_peers.PEERS,
        metavar="PEER",
        help=f"measure these beside jaxkv instead: {', '.join(benchmark_peers.PEERS)}",
    )
    args = parser.parse_args()
    if args.repeats is not None and args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if args.vs:
        beside_peers(args)
    else:
        alone(args)


def save(path: Path | None, summary: dict, records: list[dict]) -> None:
    if path:
        path.write_text(json.dumps({"summary": summary, "cells": records}, indent=1) + "\n")


def beside_peers(args: argparse.Namespace) -> None:
    console, records = Console(soft_wrap=True, highlight=False), []
    try:
        for record in benchmark_peers.measure(
            args.vs,
            args.model,
            python_documentation(),
            quick=args.quick,
            repeats=args.repeats or 3,
            console=console,
        ):
            console.print(benchmark_peers.line(record))
            records.append(record)
            save(args.json, MACHINE, records)
    except (benchmark_peers.PeerError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    console.print(benchmark_peers.table(records))


def alone(args: argparse.Namespace) -> None:
    records = measure(args.model, args.quick, args.repeats or 5)
    show(records)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    summary: dict[str, Any] = {**MACHINE, "peak_mb": peak}
    if not args.quick:
        cold_start(args.model, warm=True)  # fills the compilation cache
        summary["warm_start_s"] = round(cold_start(args.model, warm=True), 1)
        summary["cold_start_s"] = round(cold_start(args.model, warm=False), 1)
        for policy in ("full", "h2o"):
            extra = prompt_memory(args.model, 8191, policy) / 1e6
            summary[f"prompt_8191_{policy}_peak_beyond_weights_mb"] = round(extra)
    print(json.dumps(summary))
    save(args.json, summary, records)


if __name__ == "__main__":
    main()
