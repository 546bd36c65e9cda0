"""Does a cache that shares distant keys still find a needle, and where do others lose it?

    python scripts/pod_needle.py --plan plan35.json --json needle.json      # 1 hour
    python scripts/pod_needle.py --quick                                    # 4 minutes

Needle in a haystack as the PoD paper shows it (arXiv 2412.02252: PoD as dense; StreamingLLM and H2O
miss needles outside their window), for

- full: the whole cache;
- PoD: under the plan; with its maps where it has some (`jaxkv.pod.repair`), and without;
- PoD, adapted: with `--weights FOLDER` of `jaxkv.pod.adapt`;
- streaming, h2o, snapkv: so many tokens that their keys and values take as many bytes as PoD's when
  the context has been read (`PodPlan.saving_at`), or with `--keep SHARE` that share of the context:
  the paper's table has them at 0.125.

The question is not known when the context is read; with `--aware` its end is read with the context.
The last table is the paper's case study: at the longest length, who finds a needle in the near
window (at the end), at the start, in the middle, and at some depth drawn by chance. Needles are as
in `jaxkv.evaluate.needle`; log-probabilities are means over the answer's tokens.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pod_common import (
    NEAR,
    PLAN,
    Option,
    Records,
    add_options,
    explored,
    model_parser,
    parse,
    read_texts,
    repaired,
    run,
    sinks_and_recent,
    table,
)

import jaxkv
from jaxkv import Params, PoD, PodPlan
from jaxkv.evaluate.needle import needle_grid
from jaxkv.policies import Policy, get

OPTIONS = [
    Option("lengths", int, [512, 1024, 2048], [384], "tokens of context, question and answer"),
    Option("depths", float, [0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.5, 1.0], "0: start, 1: end"),
    Option("needles", int, 4, 2, "at each length and depth, at most 16"),
    Option("saving", float, 0.35, 0.15, "to aim at if no --plan is given"),
    NEAR,
    *PLAN,
]
EVICTING = ("streaming", "h2o", "snapkv")
#: Where the needles of the case study stand; None is drawn by chance.
CASES = {"near window": 1.0, "start": 0.0, "middle": 0.5, "anywhere": None}


def chosen_plan(args: argparse.Namespace, params: Params, texts: Any) -> PodPlan:
    """The one that was given, or one that is made now."""
    if args.plan is not None:
        plan = PodPlan.load(args.plan)
        plan.check(params.config)
        return plan
    plan = explored(args, params, texts, args.saving)
    return repaired(args, params, texts, plan) if args.repair else plan


def rivals(
    args: argparse.Namespace, params: Params, plan: PodPlan, context: int
) -> Iterator[tuple[str, Params, Policy, float]]:
    """Who is asked about a context of so many tokens, beside the whole cache: a name, a model, a
    policy, and what it saves of keys and values.
    """
    near = sinks_and_recent(args)
    saved = plan.saving_at(context, **near)
    if plan.maps is not None:
        yield "PoD", params, PoD(plan, **near), saved
    yield "PoD, no maps", params, PoD(dataclasses.replace(plan, maps=None), **near), saved
    if args.weights is not None:
        adapted = jaxkv.pod.with_weights(params, args.weights)
        yield "PoD, adapted", adapted, PoD(plan, **near), saved
    kept = round((args.keep or 1 - saved) * context)
    for name in EVICTING:
        yield name, params, get(name, kept), 1 - kept / context


def measure(args: argparse.Namespace) -> Records:
    if args.keep is not None and not 0 < args.keep <= 1:
        raise ValueError(f"--keep must be in (0, 1], got {args.keep}")
    sinks_and_recent(args)
    params = jaxkv.load(args.model)
    texts = read_texts(args, params)
    plan = chosen_plan(args, params, texts)
    haystack = [token for row in texts.measured for token in row]
    chance = round(float(np.random.default_rng(args.seed).uniform()), 3)
    depths = sorted({*args.depths, chance, *(d for d in CASES.values() if d is not None)})
    records = Records(
        args,
        model=args.model,
        aware=args.aware,
        needles=args.needles,
        depths=depths,
        chance=chance,
        saving=plan.saving,
        near=list(args.near),
        plan=str(args.plan or "explored"),
    )

    def ask(length: int, name: str, model: Params, policy: Policy, saved: float) -> float:
        grid = needle_grid(
            model,
            haystack,
            policy=policy,
            lengths=[length],
            depths=depths,
            needles=args.needles,
            seed=args.seed,
            aware=args.aware,
        )
        records.add(
            f"{length} tokens, {name}: {grid.score:.0%} found, log-probability {grid.logprob:.2f}",
            length=length,
            method=name,
            policy=_told(policy),
            kept=grid.kept[0],
            saved=saved,
            found=list(grid.found[0]),
            logprobs=list(grid.logprobs[0]),
        )
        return grid.kept[0]

    for length in args.lengths:
        context = round(ask(length, "full", params, get("full"), 0.0))
        for rival in rivals(args, params, plan, context):
            ask(length, *rival)
    return records


def _told(policy: Policy) -> str:
    """A plan is too long for a record."""
    return f"PoD({policy.sinks}, {policy.recent})" if isinstance(policy, PoD) else repr(policy)


def report(records: list[dict[str, Any]]) -> str:
    """Markdown: everyone at every length, then by depth at the longest, then the case study."""
    first = records[0]
    known = "known" if first["aware"] else "not known"
    lengths = list(dict.fromkeys(r["length"] for r in records))
    methods = list(dict.fromkeys(r["method"] for r in records))
    by = {(r["method"], r["length"]): r for r in records}
    lines = [
        f"{first['model']}, plan {first['plan']} (saving {first['saving']:.1%}), near tokens "
        f"{first['near'][0]} + {first['near'][1]}; the question is {known} while reading; "
        f"{first['needles']} needles at each of {len(first['depths'])} depths.",
        "",
    ]
    titles = [f"{what} {length}" for length in lengths for what in ("saved", "found", "logprob")]
    rows = []
    for method in methods:
        cells = []
        for length in lengths:
            r = by[method, length]
            cells += [f"{r['saved']:.1%}", f"{np.mean(r['found']):.0%}"]
            cells.append(f"{np.mean(r['logprobs']):.2f}")
        rows.append([method, *cells])
    lines += [table(["method", *titles], rows), ""]
    longest = lengths[-1]
    lines += [f"Found in {longest} tokens, by depth (0 is the start):", ""]
    rows = [[m, *(f"{share:.0%}" for share in by[m, longest]["found"])] for m in methods]
    lines += [table(["method", *(f"{d:g}" for d in first["depths"])], rows), ""]
    lines += [f"The case study in {longest} tokens, found of {first['needles']}:", ""]
    rows = []
    for case, depth in CASES.items():
        at = first["depths"].index(first["chance"] if depth is None else depth)
        counts = [round(by[m, longest]["found"][at] * first["needles"]) for m in methods]
        rows.append([case if depth is not None else f"{case} ({first['chance']:g})", *counts])
    lines += [table(["needle", *methods], rows)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    made = model_parser(__doc__ or "")
    made.add_argument("--plan", type=Path, metavar="FILE", help="default: explore and repair one")
    made.add_argument("--weights", type=Path, metavar="FOLDER", help="of jaxkv.pod.adapt")
    made.add_argument("--aware", action="store_true", help="the question is read with the context")
    made.add_argument(
        "--keep", type=float, metavar="SHARE", help="tokens that evicting policies keep"
    )
    made.add_argument("--seed", type=int, default=0, metavar="N")
    add_options(made, OPTIONS)
    args = parse(made, OPTIONS, arguments)
    run(made, lambda: print(report(measure(args).all)))


if __name__ == "__main__":
    main()
