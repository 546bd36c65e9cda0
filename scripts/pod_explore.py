"""Which layers attend alike, and what sharing their keys would save and cost.

    python scripts/pod_explore.py --out pod --json explore.json     # 15 minutes
    python scripts/pod_explore.py --quick --out pod                 # 3 minutes

The first step of PoD (arXiv 2412.02252): `jaxkv.pod.explore` compares layers on texts. For each
target saving this writes a plan (`plan_35.json`) and a picture of it, and measures perplexity on
other texts: of the whole cache, under the plan as it is, and repaired (`jaxkv.pod.repair`; the
plan that is written has the maps then). The paper's threshold of 0.5 saves 35% of its models' keys
and values.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pod_common import (
    NEAR,
    PLAN,
    Option,
    Records,
    add_options,
    explored,
    measured_pieces,
    model_parser,
    parse,
    read_texts,
    repaired,
    run,
    shown,
    sinks_and_recent,
    table,
)

import jaxkv

OPTIONS = [
    Option("savings", float, [0.08, 0.35], [0.35], "shares of keys and values to save"),
    Option("length", int, 1024, 512, "tokens of the texts that are measured"),
    Option("count", int, 3, 1, "how many of them"),
    NEAR,
    *PLAN,
]


def main(arguments: Sequence[str] | None = None) -> None:
    made = model_parser(__doc__ or "")
    made.add_argument("--out", type=Path, default=Path("pod"), help="folder for plans and pictures")
    add_options(made, OPTIONS)
    args = parse(made, OPTIONS, arguments)
    run(made, lambda: measure(args))


def measure(args) -> None:
    params, near = jaxkv.load(args.model), sinks_and_recent(args)
    texts = read_texts(args, params)
    rows = measured_pieces(params, texts, args.length, args.count)
    args.out.mkdir(parents=True, exist_ok=True)
    records = Records(args, model=args.model, near=args.near, length=args.length)

    def perplexity(policy) -> float:
        losses = [np.log(jaxkv.perplexity(params, row, policy=policy)) for row in rows]
        return float(np.exp(np.mean(losses)))

    full = perplexity("full")
    records.add(f"full: perplexity {full:.2f}", plan="full", perplexity=full)
    plan = None
    for saving in args.savings:
        if plan is None:
            plan = explored(args, params, texts, saving)
        else:
            plan = jaxkv.pod.replan(plan, target_saving=saving)
        record = {
            "plan": f"{saving:.0%}",
            "threshold": plan.settings["threshold"],
            "saving": plan.saving,
            "saved": plan.saving_at(args.length, **near),
            "perplexity": perplexity(jaxkv.PoD(plan, **near)),
        }
        mended = plan
        if args.repair:
            mended = repaired(args, params, texts, plan)
            record["repaired"] = perplexity(jaxkv.PoD(mended, **near))
        name = args.out / f"plan_{100 * saving:.0f}"
        mended.save(name.with_suffix(".json"))
        jaxkv.pod.draw(plan, name.with_suffix(".png"))
        records.add(f"{record['plan']}: perplexity {record['perplexity']:.2f}", **record)
    columns = [("threshold", ".3f"), ("saving", ".1%"), ("saved", ".1%")]
    columns += [("perplexity", ".2f"), ("repaired", ".2f")]
    print(
        f"{args.model}: {args.count} texts of {args.length} tokens, near tokens "
        f"{' + '.join(map(str, args.near))}; saving for texts without end, saved at this length.\n"
    )
    cells = [
        [record["plan"], *(shown(record, key, form) for key, form in columns)]
        for record in records.all
    ]
    print(table(["plan", *(name for name, _ in columns)], cells))


if __name__ == "__main__":
    main()
