#!/usr/bin/env python3
"""Text without end in constant memory: perplexity and memory along the way, for policies with
rolling positions at equal slots.

    python scripts/endless.py --tokens 200000                 # SmolLM2-135M
    python scripts/endless.py --model tiny --tokens 4000000   # random weights, memory only

Texts are read over and over until there are enough tokens. Perplexity is of each stretch of the
text.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv import loops
from jaxkv.buckets import pad_rows
from jaxkv.models.llama import Llama, LlamaConfig
from jaxkv.models.params import random_params
from jaxkv.policies import get
from jaxkv.positions import rotary_frequencies
from jaxkv.room import plan

#: The tiny model has Llama's shape and this many trained positions.
TINY_POSITIONS = 2048


def tiny() -> jaxkv.Params:
    """A model that costs next to nothing, for counting tokens rather than understanding them."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=TINY_POSITIONS,
        tie_embeddings=True,
        rotary_embedding=rotary_frequencies(16, 10000.0, None),
        norm_eps=1e-5,
        windows=(None, None),
    )
    return random_params(Llama, config)


def default_text() -> str:
    """CPython's own documentation, which is on every machine."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def rolling(name: str, budget: int) -> jaxkv.Policy:
    """A policy by name, with rolling positions."""
    policy = get(name, budget)
    if policy.positions == "original":
        policy = dataclasses.replace(policy, positions="rolling")
    return policy


def stretches(
    params: jaxkv.Params, ids: Sequence[int], policy: jaxkv.Policy, block: int, stretch: int
) -> Iterator[dict[str, Any]]:
    """Reads the text block by block; yields a record after each stretch."""
    total = len(ids) - 1
    planned = plan(params, policy, [len(ids)], new=total, grow=0, chunk=block)
    budgets = jnp.array(planned.budgets)
    cache = loops.empty_cache(planned.weights, planned.policy, budgets, planned.slots)
    logprobs, count, start = 0.0, 0, time.perf_counter()
    for first in range(0, total, block):
        end = min(first + block, total)
        tokens, added = pad_rows([ids[first:end]], block)
        wanted, _ = pad_rows([ids[first + 1 : end + 1]], block)
        cache, logprob, _ = loops.score_tokens(
            planned.weights, cache, tokens, wanted, added, planned.policy, True
        )
        logprobs, count = logprobs + float(logprob[0]), count + end - first
        if end % stretch < block or end == total:
            yield {
                "tokens": end,
                "perplexity": math.exp(-logprobs / count),
                "kept": int(max(int(layer.stored().max()) for layer in cache.layers)),
                "cache_bytes": cache.nbytes,
                "live_bytes": sum(array.nbytes for array in jax.live_arrays()),
                "resident_bytes": resident(),
                "tokens_per_second": count / (time.perf_counter() - start),
            }
            logprobs, count, start = 0.0, 0, time.perf_counter()


def resident() -> int | None:
    """Memory of the process in bytes, where the system says."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = status.read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def main(arguments: argparse.Namespace) -> None:
    params = tiny() if arguments.model == "tiny" else jaxkv.load(arguments.model)
    text = default_text() if arguments.texts is None else Path(arguments.texts).read_text("utf-8")
    ids = list(text.encode()) if params.tokenizer is None else params.tokenizer.encode(text)
    ids = (ids * (arguments.tokens // len(ids) + 1))[: arguments.tokens]
    for name in arguments.policies:
        policy = rolling(name, arguments.budget)
        print(f"{policy!r}: {len(ids)} tokens in blocks of {arguments.block}", flush=True)
        for record in stretches(params, ids, policy, arguments.block, arguments.stretch):
            memory = record["resident_bytes"]
            print(
                f"  {record['tokens']:>9} tokens  perplexity {record['perplexity']:8.3f}  kept "
                f"{record['kept']:>5}  arrays {record['live_bytes'] / 1e6:8.1f} MB  process "
                f"{'?' if memory is None else format(memory / 1e6, '8.1f')} MB  "
                f"{record['tokens_per_second']:8.0f} tokens/s",
                flush=True,
            )
            if arguments.json:
                record |= {"policy": repr(policy), "model": arguments.model}
                record |= {"block": arguments.block, "budget": arguments.budget}
                with open(arguments.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model", default="smollm2-135m", help='or "tiny"')
    result.add_argument("--tokens", type=int, default=200_000)
    result.add_argument("--policies", nargs="+", default=["streaming", "h2o"])
    result.add_argument("--budget", type=int, default=1024, help="tokens kept per KV head")
    result.add_argument("--block", type=int, default=256, help="tokens read at once")
    result.add_argument("--stretch", type=int, default=20_480, help="tokens between two lines")
    result.add_argument("--texts", help="a text file; CPython's documentation if left out")
    result.add_argument("--json", help="append one record per line to this file")
    return result


if __name__ == "__main__":
    try:
        main(parser().parse_args())
    except (ValueError, OSError) as error:
        print(f"endless: {error}", file=sys.stderr)
        raise SystemExit(2) from None
