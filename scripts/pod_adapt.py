"""A light post-training under PoD, and its rivals on the same tokens.

    python scripts/pod_adapt.py --plan pod/plan_35.json --out adapted            # half an hour
    python scripts/pod_adapt.py --quick --plan pod/plan_35.json --out adapted    # 10 minutes

`jaxkv.pod.adapt` for each of `--forms`: pod (from the plan's maps, if it has some), dense (the
same tokens on the whole cache: the reference of the paper, arXiv 2412.02252), window (a sliding
window of the near tokens, with sinks), cla (pairs of layers share keys and values, from averaged
projections). All but dense learn the dense model's predictions; `--distill 0` learns the next
token. At every checkpoint perplexity is measured on texts that are not trained on. A run that was
stopped goes on.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pod_common import (
    NEAR,
    Option,
    Records,
    add_options,
    measured_pieces,
    model_parser,
    parse,
    read_texts,
    run,
    sinks_and_recent,
    table,
)

import jaxkv
from jaxkv.pod.adapt import LOG
from jaxkv.policies import Policy

OPTIONS = [
    Option("steps", int, 120, 6, "updates"),
    Option("length", int, 1024, 256, "tokens of a row, and of the texts that are measured"),
    Option("batch", int, 1, 1, "rows of an update"),
    Option("count", int, 2, 1, "texts that are measured"),
    Option("every", int, 20, 3, "updates between checkpoints"),
    Option("returning", float, 0.46875, 0.46875, "share of every other row that comes again"),
    Option("learning-rate", float, 2e-4, 2e-4, "the highest"),
    Option("distill", float, 1.0, 1.0, "weight of the dense model's predictions"),
    NEAR,
]
FORMS = ("pod", "dense", "window", "cla")


def main(arguments: Sequence[str] | None = None) -> None:
    made = model_parser(__doc__ or "")
    made.add_argument("--plan", type=Path, required=True, help="of pod_explore.py")
    made.add_argument("--out", type=Path, required=True, help="folder, one below it per form")
    made.add_argument("--forms", nargs="+", choices=FORMS, default=["pod"])
    add_options(made, OPTIONS)
    args = parse(made, OPTIONS, arguments)
    run(made, lambda: measure(args))


def measure(args: argparse.Namespace) -> None:
    params, near = jaxkv.load(args.model), sinks_and_recent(args)
    plan = jaxkv.PodPlan.load(args.plan)
    texts = read_texts(args, params)
    rows = measured_pieces(params, texts, args.length, args.count)
    documents = texts.fitted
    if args.returning:
        documents = jaxkv.pod.pieces(params, texts.fitted, args.length)
        again = int(args.returning * args.length)
        documents[::2] = jaxkv.pod.returning(documents[::2], again)
    records = Records(args, model=args.model, near=args.near, length=args.length)
    pairs = jaxkv.PodPlan.every(2, params.config)
    policies: dict[str, Policy] = {
        "pod": jaxkv.PoD(plan, **near),
        "dense": jaxkv.Full(),
        "window": jaxkv.Streaming(sum(args.near), sinks=near["sinks"], positions="original"),
        "cla": jaxkv.CLA(pairs),
    }

    def perplexity(model: jaxkv.Params, policy: Policy) -> float:
        losses = [np.log(jaxkv.perplexity(model, row, policy=policy)) for row in rows]
        return float(np.exp(np.mean(losses)))

    full = perplexity(params, jaxkv.Full())
    records.add(f"full, not trained: perplexity {full:.2f}", form="full", step=0, perplexity=full)
    for form in args.forms:
        policy = policies[form]

        def look(step: int, model: jaxkv.Params, form: str = form, policy: Policy = policy) -> Any:
            found = perplexity(model, policy)
            told = f"{form}, update {step}: perplexity {found:.2f}"
            records.add(told, form=form, step=step, perplexity=found)
            return {"perplexity": found}

        start = jaxkv.pod.averaged(params, pairs) if form == "cla" else params
        look(0, start)
        jaxkv.pod.adapt(
            start,
            documents,
            policy=policy,
            teacher=params,
            folder=args.out / form,
            steps=args.steps,
            length=args.length,
            batch=args.batch,
            save_every=args.every,
            learning_rate=args.learning_rate,
            distill=0.0 if form == "dense" else args.distill,
            watch=look,
        )
    print(
        f"{args.model}: perplexity of {args.count} texts of {args.length} tokens; {args.length} x "
        f"{args.batch} tokens per update. Whole cache, not trained: {full:.2f}.\n"
    )
    steps = sorted({record["step"] for record in records.all if record["form"] != "full"})
    cells = []
    for step in steps:
        found = {r["form"]: r["perplexity"] for r in records.all if r["step"] == step}
        cells.append([step, *(f"{found[f]:.2f}" if f in found else "" for f in args.forms)])
    print(table(["update", *args.forms], cells))
    for form in args.forms:
        lines = (args.out / form / LOG).read_text(encoding="utf-8").splitlines()
        spent = sum(json.loads(line).get("seconds", 0.0) for line in lines)
        print(f"\n{form}: {spent:.0f} s of training, log and loss curve in {args.out / form}")


if __name__ == "__main__":
    main()
