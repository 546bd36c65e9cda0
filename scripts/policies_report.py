"""The tables and the picture of `scripts/policies_table.py`, made of its records.

python scripts/policies_report.py results          # again, from results/policies.json
"""

import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

PROTOCOLS = {
    "decode": "perplexity while decoding",
    "prompt": "perplexity after a prompt",
    "needle": "needles, question unknown",
    "needle-aware": "needles, question known",
}


def report(records: list[dict[str, Any]], folder: Path, console: Console) -> None:
    """Writes `policies.md` and, where matplotlib is installed, `policies.png`."""
    if not any("value" in record for record in records):
        console.print("nothing was measured: no tables")
        return
    write_tables(records, folder / "policies.md")
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: matplotlib is not installed (pip install 'jaxkv[plots]')")
    else:
        draw(records, folder / "policies.png")
    console.print(f"written to {folder}")


def write_tables(records: list[dict[str, Any]], path: Path) -> None:
    """Markdown: a table for each text, then what was found of needles, then what was left out."""
    measured = [r for r in records if "value" in r]
    policies = list(dict.fromkeys(r["policy"] for r in measured))
    told = ", ".join(f"{k} {v}" for k, v in _versions_of(records).items())
    lines = ["# Policies", "", f"Measured with {told}.", ""]
    for text in dict.fromkeys(r["text"] for r in measured if "prompt" in r):
        own = [r for r in measured if r["text"] == text and "prompt" in r]
        lines += _perplexity_table(text, own, policies)
    needles = [r for r in measured if "found" in r]
    if needles:
        lines += _needle_table(needles, policies)
    skipped = [r for r in records if "skipped" in r]
    if skipped:
        lines += ["## Left out", ""]
        lines += [
            f"- {r['policy']}, {r['protocol']}"
            + (f", {r['budget']:.0%}" if "budget" in r else "")
            + f": {r['skipped']}"
            for r in skipped
        ]
    path.write_text("\n".join(lines).rstrip() + "\n")


def _versions_of(records: list[dict[str, Any]]) -> dict[str, str]:
    return {key: records[-1][key] for key in ("model", "jaxkv", "jax", "python")}


def _perplexity_table(text: str, records: list[dict[str, Any]], policies: list[str]) -> list[str]:
    """Under every budget, perplexities and bytes of the cache."""
    table = Lookup(records)
    protocols = [p for p in ("decode", "prompt") if any(r["protocol"] == p for r in records)]
    lines = [f"## {text}", ""]
    for protocol in protocols:
        record = next(r for r in records if r["protocol"] == protocol)
        how = f"after a prompt of {record['prompt']}" if record["prompt"] else "one at a time"
        count = record["tokens"] - max(record["prompt"], 1)
        lines.append(f"- {protocol}: perplexity of {count} tokens, {how}")
    lines += [f"- MB: the cache of one text at the end of `{protocols[-1]}`", ""]
    columns = [(protocol, "value", 1.0, ".2f") for protocol in protocols]
    columns.append((protocols[-1], "cache_bytes", 1e6, ".1f"))
    titles = [*protocols, "MB"]
    lines += _head(["policy", *(f"{t} {b:.0%}" for t in titles for b in table.budgets)])
    for policy in policies:
        cells = []
        for protocol, key, unit, form in columns:
            for budget in table.budgets:
                record = table.get(policy, protocol, budget)
                cells.append("" if record is None else format(record[key] / unit, form))
        lines.append(_line([policy, *cells]))
    return [*lines, ""]


def _needle_table(records: list[dict[str, Any]], policies: list[str]) -> list[str]:
    table, first = Lookup(records), records[0]
    lines = [
        "## Needles",
        "",
        f"Share found, and log-probability of the answer; {first['needles']} needles at each of "
        f"the depths {list_of(first['depths'])} in {list_of(first['lengths'])} tokens of "
        f"{first['text']}.",
        "",
        *_head(
            ["policy"]
            + [
                f"question {known} {budget:.0%}"
                for known in ("unknown", "known")
                for budget in table.budgets
            ]
        ),
    ]
    for policy in policies:
        found = [table.get(policy, p, b) for p in ("needle", "needle-aware") for b in table.budgets]
        cells = ["" if r is None else f"{r['value']:.0%} ({r['logprob']:.2f})" for r in found]
        if any(cells):
            lines.append(_line([policy, *cells]))
    return [*lines, ""]


class Lookup:
    """Records by policy, protocol and budget; what has no budget counts for all."""

    def __init__(self, records: list[dict[str, Any]]):
        self.records = {(r["policy"], r["protocol"], r["budget"]): r for r in records}
        given = {r["budget"] for r in records}
        self.budgets = sorted(given - {1.0}) or [1.0]

    def get(self, policy: str, protocol: str, budget: float) -> dict[str, Any] | None:
        unbounded = self.records.get((policy, protocol, 1.0))
        return self.records.get((policy, protocol, budget), unbounded)


def list_of(values: list[Any]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _head(titles: list[str]) -> list[str]:
    return [_line(titles), _line(["---"] + ["---:"] * (len(titles) - 1))]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Perplexities relative to the full cache, and where needles were found."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    measured = [r for r in records if "value" in r]
    panels: list[Callable[[Any], None]] = []
    for text in dict.fromkeys(r["text"] for r in measured if "prompt" in r):
        for protocol in ("decode", "prompt"):
            own = [r for r in measured if r["text"] == text and r["protocol"] == protocol]
            if any(r["policy"] == "full" for r in own) and len({r["policy"] for r in own}) > 1:
                panels.append(functools.partial(_draw_perplexities, own))
    for protocol in ("needle", "needle-aware"):
        own = [r for r in measured if r["protocol"] == protocol]
        for budget in Lookup(own).budgets if own else []:
            chosen = [r for r in own if r["budget"] in (budget, 1.0)]
            panels.append(functools.partial(_draw_needles, chosen, budget))
    if not panels:
        return
    count = len({r["policy"] for r in measured})
    rows = -(-len(panels) // 2)
    height = 1.6 + 0.26 * count
    figure, axes = pyplot.subplots(
        rows, 2, figsize=(13, height * rows), layout="constrained", squeeze=False
    )
    for panel, axis in zip(panels, axes.flat, strict=False):
        panel(axis)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.suptitle(", ".join(f"{k} {v}" for k, v in _versions_of(records).items()), fontsize=9)
    figure.savefig(path, dpi=110)


def _draw_perplexities(records: list[dict[str, Any]], axis: Any) -> None:
    table = Lookup(records)
    full = next(r["value"] for r in records if r["policy"] == "full")
    policies = {r["policy"] for r in records} - {"full"}
    middle = table.budgets[len(table.budgets) // 2]

    def ratio(policy: str, budget: float) -> float:
        record = table.get(policy, records[0]["protocol"], budget)
        return float("nan") if record is None else record["value"] / full

    worst = float("inf")
    order = sorted(policies, key=lambda p: -min(ratio(p, middle), worst))
    place = range(len(order))
    low = [min(ratio(p, b) for b in table.budgets) for p in order]
    high = [max(ratio(p, b) for b in table.budgets) for p in order]
    axis.hlines(place, low, high, color="0.85", zorder=1)
    shades = ["#9ecae1", "#4292c6", "#08306b"]
    for number, budget in enumerate(table.budgets):
        axis.scatter(
            [ratio(p, budget) for p in order],
            place,
            s=26,
            color=shades[round(number * 2 / max(len(table.budgets) - 1, 1))],
            label=f"{budget:.0%} kept",
            zorder=2,
        )
    axis.axvline(1, color="0.4", linewidth=1)
    axis.set_xscale("log")
    axis.set_yticks(place, order, fontsize=8)
    axis.set_xlabel(f"perplexity / {full:.1f} of the full cache")
    axis.set_title(f"{records[0]['text']}: {PROTOCOLS[records[0]['protocol']]}", fontsize=10)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.tick_params(axis="x", which="both", labelsize=7)
    axis.legend(fontsize=8)


def _draw_needles(records: list[dict[str, Any]], budget: float, axis: Any) -> None:
    records = sorted(records, key=lambda r: (r["value"], r["logprob"]), reverse=True)
    first = records[0]
    # One column for each length and depth.
    found = [[share for row in r["found"] for share in row] for r in records]
    image = axis.imshow(found, aspect="auto", cmap="YlGn", vmin=0, vmax=1)
    columns = [(n, d) for n in first["lengths"] for d in first["depths"]]
    names = [f"{d:g}" if len(first["lengths"]) == 1 else f"{n}\n{d:g}" for n, d in columns]
    axis.set_xticks(range(len(columns)), names, fontsize=8)
    axis.set_yticks(range(len(records)), [r["policy"] for r in records], fontsize=8)
    axis.set_xlabel(f"depth of the needle in {list_of(first['lengths'])} tokens")
    axis.set_title(f"{PROTOCOLS[first['protocol']]}, {budget:.0%} kept", fontsize=10)
    axis.figure.colorbar(image, ax=axis, label="share found")


if __name__ == "__main__":
    chosen = Path(sys.argv[1] if len(sys.argv) > 1 else "policies")
    if not (chosen / "policies.json").is_file():
        sys.exit(f"{chosen} holds no policies.json: give the folder of a run")
    report(json.loads((chosen / "policies.json").read_text()), chosen, Console(highlight=False))
