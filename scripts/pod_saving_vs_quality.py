"""What sharing costs in quality: perplexity against the memory that is saved.

    python scripts/pod_saving_vs_quality.py --json saving.json --picture saving.png   # 2 hours
    python scripts/pod_saving_vs_quality.py --quick                                   # 3 minutes

Answers, for a small model that has not been adapted, the sweeps of the PoD paper (arXiv
2412.02252): quality over the saving, over the number of near tokens, and over tau, the share of the
softmax from which the far part of a step is skipped (published: tau 0.7 saves a quarter of the
attention for 5% on L-Eval); and beside them H2O and SnapKV where they store as much.

Layers are explored once; plans for all savings follow from the similarities (`jaxkv.pod.replan`).
Each is measured as it is, and repaired (`jaxkv.pod.repair`). All perplexities are of the tokens
that follow a prompt, so that all are predicted from a compressed cache. Columns:

- saving: of keys and values of texts without end; half would be the most.
- saved: of the keys and values of the prompt, since near tokens share nothing.
- MB: the cache of one text in the end, with all that belongs to it.
- skipped: far parts of steps that were left out, of all there were.
- attention saved: of the keys and values that all heads would read in a step, those that need not
  be: skipped far parts x heads that follow x distant tokens, and half of that under "exact", which
  reads the keys. (So much need not be read; a step that skips for some heads only reads them all.)

`h2o` and `snapkv` keep so many tokens of the prompt that their keys and values take as many bytes.
"""

import argparse
import math
from collections.abc import Sequence
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
from jaxkv import PoD, PodPlan
from jaxkv.evaluate.perplexity import perplexities
from jaxkv.policies import get
from jaxkv.shared import SKIP_FORMS

OPTIONS = [
    Option("savings", float, [0.02, 0.08, 0.15, 0.23, 0.35, 0.45], [0.35], "to aim at"),
    Option("saving", float, 0.35, 0.35, "of the plan for the other sweeps"),
    Option("recents", int, [56, 120, 240, 496], [], "latest tokens that do not share, to try"),
    Option("taus", float, [0.5, 0.7, 0.9], [], "shares from which far parts are skipped"),
    NEAR,
    Option("tokens", int, 1024, 448, "tokens of a text, its prompt included"),
    Option("prompt", int, 768, 384, "tokens of the prompt"),
    Option("count", int, 4, 2, "texts, evenly spread over those given"),
    *PLAN,
]
EVICTING = ("h2o", "snapkv")


class Measuring:
    """Texts, a model and the plan that was explored, and what was found."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.params = jaxkv.load(args.model)
        self.texts = read_texts(args, self.params)
        self.near = sinks_and_recent(args)
        _check(args, self.near)
        self.rows = measured_pieces(self.params, self.texts, args.tokens, args.count)
        self.records = Records(
            args, model=args.model, tokens=args.tokens, prompt=args.prompt, texts=len(self.rows)
        )
        if args.plan is None:
            self.base = explored(args, self.params, self.texts, args.saving)
        else:
            self.base = PodPlan.load(args.plan)
            self.base.check(self.params.config)

    def run(self) -> Records:
        args = self.args
        self.full = self._score("full", [None], method="full", sweep="saving", saved=0.0)[0]
        # The plan of the other sweeps last, so that it need not be repaired twice.
        targets = [*(t for t in args.savings if t != args.saving), args.saving]
        plans = [self._saving(target) for target in targets]
        kept = [round(args.prompt * (1 - self._saved(plan))) for plan in plans]
        for name in EVICTING:
            policy = get(name)
            budgets = sorted(n for n in set(kept) if policy.minimum <= n < args.prompt)
            self._score(name, budgets, method=name, sweep="saving")
        chosen = plans[-1]
        for recent in args.recents:
            self._pod(chosen, sweep="near", **{**self.near, "recent": recent})
        for form in SKIP_FORMS:
            for tau in args.taus:
                self._pod(chosen, sweep="skip", skip=(form, tau), **self.near)
        return self.records

    def _saving(self, target: float) -> PodPlan:
        """Measures the plan that saves so much, and gives it, with its maps if there are any."""
        plan = jaxkv.pod.replan(self.base, target_saving=target)
        self._pod(plan, sweep="saving", target=target, **self.near)
        if not self.args.repair:
            return plan
        plan = repaired(self.args, self.params, self.texts, plan)
        self._pod(plan, sweep="saving", target=target, **self.near)
        return plan

    def _saved(self, plan: PodPlan, **near: int) -> float:
        return plan.saving_at(self.args.prompt, **(near or self.near))

    def _pod(
        self,
        plan: PodPlan,
        *,
        sinks: int,
        recent: int,
        skip: tuple[str, float] | None = None,
        **about: Any,
    ) -> None:
        self._score(
            PoD(plan, sinks=sinks, recent=recent, skip=skip),
            [None],
            method="PoD" if plan.maps is None else "PoD, repaired",
            threshold=plan.settings.get("threshold"),
            saving=plan.saving,
            saved=self._saved(plan, sinks=sinks, recent=recent),
            sinks=sinks,
            recent=recent,
            skip=skip,
            **about,
        )

    def _score(self, policy: Any, budgets: list[Any], **about: Any) -> list[dict[str, Any]]:
        """Measures a policy under budgets."""
        if not budgets:
            return []
        prompt = self.args.prompt
        found = perplexities(self.params, self.rows, policy=policy, budgets=budgets, prompt=prompt)
        made = []
        for budget, scored in zip(budgets, found, strict=True):
            record = {
                **about,
                "perplexity": math.exp(np.mean([math.log(one.perplexity) for one in scored])),
                "accuracy": float(np.mean([one.accuracy for one in scored])),
                "cache_bytes": int(np.mean([one.cache_bytes for one in scored])),
            }
            if budget is not None:
                record |= {"kept": budget, "saved": 1 - budget / prompt}
            if about.get("skip"):
                record |= self._skipped(float(np.mean([one.skipped for one in scored])), about)
            made.append(self.records.add(_told(record), **record))
        return made

    def _skipped(self, share: float, about: dict[str, Any]) -> dict[str, float]:
        """What skipping saves of the keys and values that steps read."""
        near = about["sinks"] + about["recent"]
        lengths = range(self.args.prompt, self.args.tokens)
        distant = np.mean([max(0, length - near) / length for length in lengths])
        parts = 1.0 if about["skip"][0] == "predicted" else 0.5
        # Twice the saving is the share of heads that follow.
        return {"skipped": share, "attention_saved": share * 2 * about["saving"] * distant * parts}


def _check(args: argparse.Namespace, near: dict[str, int]) -> None:
    """Raises `ValueError` for numbers that do not go together."""
    if not 1 < args.prompt < args.tokens:
        raise ValueError(f"--prompt must be above 1 and below --tokens={args.tokens}")
    if sum(near.values()) >= args.prompt:
        raise ValueError(
            f"--near {near['sinks']} {near['recent']} leaves no distant tokens in a prompt of "
            f"{args.prompt}"
        )


def _told(record: dict[str, Any]) -> str:
    parts = [record["method"], f"{record['saved']:.1%} saved"]
    if record["sweep"] == "near":
        parts.append(f"recent {record['recent']}")
    if "skipped" in record:
        form, tau = record["skip"]
        parts.append(f"{form} {tau:g}: {record['skipped']:.1%} skipped")
    return ", ".join([*parts, f"perplexity {record['perplexity']:.2f}"])


def report(records: list[dict[str, Any]]) -> str:
    """Markdown: a table for each sweep."""
    first = records[0]
    full = first["perplexity"]
    lines = [
        f"{first['model']}, {first['texts']} texts: perplexity of "
        f"{first['tokens'] - first['prompt']} tokens after a prompt of {first['prompt']}.",
        "",
    ]

    def times(record: dict[str, Any]) -> str:
        return f"{record['perplexity'] / full:.2f}"

    own = [r for r in records if r["sweep"] == "saving"]
    near = next(r for r in own if "sinks" in r)
    lines += [f"Near tokens: {near['sinks']} + {near['recent']}.", ""]
    rows = [
        [
            r["method"],
            shown(r, "saving", ".1%"),
            f"{r['saved']:.1%}",
            shown(r, "kept", "d"),
            f"{r['cache_bytes'] / 1e6:.1f}",
            f"{r['perplexity']:.2f}",
            times(r),
        ]
        for r in own
    ]
    titles = ["method", "saving", "saved", "tokens kept", "MB", "perplexity", "x full"]
    lines += [table(titles, rows), ""]
    own = [r for r in records if r["sweep"] == "near"]
    if own:
        lines += [f"Latest tokens that do not share ({own[0]['method']}, saving "
                  f"{own[0]['saving']:.1%}):", ""]  # fmt: skip
        rows = [[r["recent"], f"{r['saved']:.1%}", f"{r['perplexity']:.2f}", times(r)] for r in own]
        lines += [table(["recent", "saved", "perplexity", "x full"], rows), ""]
    own = [r for r in records if r["sweep"] == "skip"]
    if own:
        lines += [f"Far parts skipped ({own[0]['method']}, saving {own[0]['saving']:.1%}):", ""]
        rows = [
            [
                r["skip"][0],
                f"{r['skip'][1]:g}",
                f"{r['skipped']:.1%}",
                f"{r['attention_saved']:.1%}",
                f"{r['perplexity']:.2f}",
                times(r),
            ]
            for r in own
        ]
        titles = ["form", "tau", "skipped", "attention saved", "perplexity", "x full"]
        lines += [table(titles, rows), ""]
    return "\n".join(lines).rstrip()


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Perplexity against what is saved of the keys and values of the prompt."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install 'jaxkv[plots]'") from None
    own = [r for r in records if r["sweep"] == "saving"]
    figure = Figure((6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(own[0]["perplexity"], color="0.5", linewidth=1, label="full")
    for method in dict.fromkeys(r["method"] for r in own[1:]):
        line = sorted((r["saved"], r["perplexity"]) for r in own if r["method"] == method)
        axes.plot(*zip(*line, strict=True), marker="o", markersize=4, label=method)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel(f"saved of the keys and values of {own[0]['prompt']} tokens")
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    axes.set_ylabel("perplexity")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    made = model_parser(__doc__ or "")
    made.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="take similarities from this plan (default: explore)",
    )
    made.add_argument("--picture", type=Path, metavar="FILE", help="draw it here")
    add_options(made, OPTIONS)
    args = parse(made, OPTIONS, arguments)

    def work() -> None:
        records = Measuring(args).run().all
        if args.picture is not None:
            draw(records, args.picture)
        print(report(records))

    run(made, work)


if __name__ == "__main__":
    main()
