"""How much of what a model says next do near tokens alone decide?

    python scripts/pod_near_tokens.py                   # SmolLM2-135M: a quarter of an hour
    python scripts/pod_near_tokens.py --quick           # two minutes

The first observation that PoD rests on (arXiv 2412.02252): near tokens, the first few of a text and
the latest, matter more than all others; with 256 of them the most probable next token is unchanged
in 80% of cases (of LLaMA3-8B-32K). Shown here is, for several numbers n, the share of positions at
which the most probable next token stays the same when every query of every layer sees only the
first `--sinks` tokens and the n - sinks latest ones, itself included. Counted are positions with
more than n tokens before them, so that something is hidden from each.

Texts are read whole, under a mask: no token has another position for it, and no cache plays a part.
"""

import argparse
import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int
from pod_common import (
    Option,
    Records,
    add_options,
    measured_pieces,
    model_parser,
    parse,
    read_texts,
    run,
    table,
)

import jaxkv
from jaxkv.loops import module_of
from jaxkv.pod.whole import Texts, Whole
from jaxkv.policies import Full

OPTIONS = [
    Option("near", int, [32, 64, 128, 256, 512, 1024, 2048], [64, 256], "near tokens to try"),
    Option("length", int, 4096, 768, "tokens of a text"),
    Option("count", int, 4, 4, "texts, evenly spread over those given"),
]
#: Positions whose logits are in memory at once.
_LOGITS_AT_ONCE = 256


@functools.partial(jax.jit, static_argnames=("window", "sinks"))
def choices(
    params: jaxkv.Params, tokens: Int[Array, "1 t"], window: int | None = None, sinks: int = 0
) -> Int[Array, " t"]:
    """The most probable next token at each position."""
    module, config = module_of(params), params.config
    texts = Texts.of(tokens)
    new = texts.as_new(config.rotary_embedding)
    layers = Whole.layers(texts, config.num_layers, window=window, sinks=sinks)
    x, _ = module.run_blocks(module.embed(tokens, texts.positions), layers, new, Full())
    parts = x.reshape(-1, math.gcd(tokens.shape[1], _LOGITS_AT_ONCE), x.shape[-1])
    return lax.map(lambda part: jnp.argmax(module.unembed(part), -1), parts).reshape(-1)


def unchanged(
    params: jaxkv.Params, rows: Sequence[Sequence[int]], near: Sequence[int], sinks: int
) -> Iterator[list[np.ndarray]]:
    """For each number of near tokens and each text: at positions with more tokens before them,
    whether the most probable next token is that of the whole text.
    """
    weights, tokens = params.weights(), [jnp.array([row], jnp.int32) for row in rows]
    whole = [np.asarray(choices(weights, row)) for row in tokens]
    for count in near:
        few = [np.asarray(choices(weights, row, count - sinks, sinks)) for row in tokens]
        yield [(a == b)[count + 1 :] for a, b in zip(few, whole, strict=True)]


def check(args: argparse.Namespace, params: jaxkv.Params) -> None:
    """Raises `ValueError` for numbers that do not go together."""
    if args.sinks < 0:
        raise ValueError(f"--sinks must be at least 0, got {args.sinks}")
    for near in args.near:
        if not args.sinks < near < args.length - 1:
            raise ValueError(
                f"--near must be above --sinks={args.sinks} and below --length={args.length} less "
                f"one, so that there are positions with more tokens before them, got {near}"
            )
    if args.length > params.config.max_positions:
        raise ValueError(
            f"--length={args.length} does not fit the {params.config.max_positions} positions of "
            f"{args.model}"
        )


def measure(args: argparse.Namespace) -> Records:
    params = jaxkv.load(args.model)
    check(args, params)
    rows = measured_pieces(params, read_texts(args, params), args.length, args.count)
    records = Records(args, model=args.model, length=args.length, texts=len(rows))
    found = unchanged(params, rows, args.near, args.sinks)
    for near, same in zip(args.near, found, strict=True):
        share = float(np.concatenate(same).mean())
        records.add(
            f"{near} near tokens: {share:.1%} unchanged",
            near=near,
            sinks=args.sinks,
            positions=sum(map(len, same)),
            unchanged=share,
            by_text=[float(part.mean()) for part in same],
        )
    return records


def report(records: Records) -> str:
    first = records.all[0]
    rows = [
        [
            r["near"],
            f"{r['unchanged']:.1%}",
            f"{min(r['by_text']):.1%} to {max(r['by_text']):.1%}",
            r["positions"],
        ]
        for r in records.all
    ]
    return (
        f"{first['model']}, {first['texts']} texts of {first['length']} tokens, the first "
        f"{first['sinks']} and the latest seen in all layers:\n\n"
        + table(["near tokens", "next token unchanged", "by text", "positions"], rows)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    made = model_parser(__doc__ or "")
    made.add_argument("--sinks", type=int, default=16, help="of the near tokens, the first ones")
    add_options(made, OPTIONS)
    args = parse(made, OPTIONS, arguments)
    run(made, lambda: print(report(measure(args))))


if __name__ == "__main__":
    main()
