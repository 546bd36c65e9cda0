"""jaxkv beside its peers on this machine, for `benchmark.py --vs transformers kvpress openvino`.

Each peer has an environment of its own, built on request. A cell is one measurement of one engine
in one process; ours and theirs take turns, and medians count. All engines read the same checkpoint
in float32, the same token ids, and use all cores.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import jaxkv
from jaxkv.hub import cache_folder, resolve

HERE = Path(__file__).parent
#: To read checkpoints of both kinds. torch is named: pip would choose a build for GPUs by itself.
_TORCH = ["torch==2.13.0", "gguf", "sentencepiece", "accelerate"]
REQUIREMENTS = {
    "transformers": [*_TORCH, "transformers==5.2.0"],
    "kvpress": [*_TORCH, "kvpress==0.5.5"],
    "openvino": [*_TORCH, "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0"],
}
#: What comes along and does not fit the torch above.
UNWANTED = {"openvino": ["torchvision"]}
PEERS = tuple(REQUIREMENTS)


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is measured of an engine and of us."""

    #: "decode" (milliseconds of a step), "prompt" (of all of it) or "perplexity" (after a prompt).
    case: str
    peer: str
    policy: str
    batch: int
    #: In the prompt, or in the cache while decoding.
    tokens: int
    #: Of those, how many stay; None for all.
    kept: int | None = None
    quick: bool = False


CELLS = (
    Cell("decode", "transformers", "full", 1, 820, quick=True),
    Cell("decode", "transformers", "full", 8, 820),
    Cell("decode", "transformers", "full", 8, 4096),
    Cell("prompt", "transformers", "full", 1, 2048),
    Cell("decode", "kvpress", "h2o", 8, 4096, 820),
    Cell("prompt", "kvpress", "h2o", 1, 4096, 820),
    Cell("prompt", "kvpress", "snapkv", 1, 4096, 820),
    Cell("perplexity", "kvpress", "h2o", 1, 768, 154, quick=True),
    Cell("perplexity", "kvpress", "snapkv", 1, 768, 154),
    Cell("decode", "openvino", "full", 1, 4000),
    Cell("decode", "openvino", "h2o", 1, 4000, 820),
    Cell("decode", "openvino", "full", 8, 2000),
    Cell("decode", "openvino", "h2o", 8, 2000, 416),
    Cell("prompt", "openvino", "full", 1, 800, quick=True),
    Cell("prompt", "openvino", "full", 1, 4000),
)
#: Tokens that perplexity is measured on, after the prompt.
SCORED = 256


class PeerError(RuntimeError):
    """A peer could not be installed, or did not run."""


def environment(peer: str, console: Console) -> Path:
    """The Python of a peer's environment, which is made if there is none."""
    folder = cache_folder() / "peers" / peer
    python = folder / "bin" / "python"
    done = folder / "requirements.json"
    wanted = json.dumps(REQUIREMENTS[peer])
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return python
    console.print(f"installing {peer} into {folder}")
    _run([sys.executable, "-m", "venv", "--clear", folder])
    _run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[peer]])
    if peer in UNWANTED:
        _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED[peer]])
    done.write_text(wanted, encoding="utf-8")
    return python


def checkpoint(peer: str, python: Path, model: str, console: Console) -> Path:
    """The folder of the model in the form that a peer reads, made if there is none."""
    source = resolve(model)
    folder = cache_folder() / "peers" / f"{peer}-{source.stem}"
    if not folder.exists():
        console.print(f"preparing {source.name} for {peer}")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as partial:
            made = Path(partial) / "checkpoint"
            job = {"peer": peer, "model": os.fspath(source.resolve()), "folder": os.fspath(made)}
            _run([python, HERE / "cell_theirs.py", "prepare", json.dumps(job)])
            made.rename(folder)  # last: a folder that is there is whole
    return folder


def _run(command: Sequence[Any], **options: Any) -> str:
    done = subprocess.run(
        list(map(os.fspath, command)), capture_output=True, text=True, check=False, **options
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise PeerError(f"{Path(command[0]).name} {command[1]}: {said[-1]}")
    return done.stdout


def measure(
    peers: Sequence[str], model: str, text: str, *, quick: bool, repeats: int, console: Console
) -> Iterator[dict[str, Any]]:
    """Records of all cells of these peers: medians over `repeats`, and their ratio to ours.

    Raises:
      PeerError: a peer could not be installed, or did not run.

    """
    tokenizer = jaxkv.load(model).tokenizer
    if tokenizer is None:
        raise PeerError(f"{model} has no tokenizer")
    ids = tokenizer.encode(text)
    for peer in peers:
        python = environment(peer, console)
        folder = checkpoint(peer, python, model, console)
        for cell in (c for c in CELLS if c.peer == peer and (c.quick or not quick)):
            job = dataclasses.asdict(cell) | {"model": model, "folder": os.fspath(folder)}
            job["ids"] = _rows(ids, cell)
            again = 1 if quick or cell.case == "perplexity" else repeats
            yield _record(cell, *_in_turn(job, python, again))


def _rows(ids: list[int], cell: Cell) -> list[list[int]]:
    """Token ids: each row begins elsewhere in the text."""
    length = cell.tokens + (SCORED if cell.case == "perplexity" else 0)
    text = ids * (1 + (length + 997 * cell.batch) // len(ids))
    return [text[997 * i : 997 * i + length] for i in range(cell.batch)]


def _in_turn(job: dict, python: Path, repeats: int) -> tuple[list[dict], list[dict]]:
    ours, theirs = [], []
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(job, file)
        file.flush()
        engines = [
            (ours, [sys.executable, HERE / "cell_ours.py", file.name]),
            (theirs, [python, HERE / "cell_theirs.py", "measure", file.name]),
        ]
        for turn in range(repeats):
            # Who begins has the cooler machine.
            for found, command in engines if turn % 2 == 0 else reversed(engines):
                found.append(json.loads(_run(command).splitlines()[-1]))
    return ours, theirs


def _record(cell: Cell, ours: list[dict], theirs: list[dict]) -> dict[str, Any]:
    """One record: our medians, theirs, and theirs as a multiple of ours."""

    def median(found: list[dict], key: str) -> float | None:
        values = [r[key] for r in found if key in r]
        return statistics.median(values) if values else None

    key = "perplexity" if cell.case == "perplexity" else "ms"
    mine, other = median(ours, key), median(theirs, key)
    record = {
        "case": cell.case,
        "policy": cell.policy,
        "batch": cell.batch,
        "tokens": cell.tokens,
        "slots": cell.kept or cell.tokens,
        "peer": cell.peer,
        key: mine,
        f"peer_{key}": other,
        "ratio": other / mine,
        "repeats": len(ours),
        "versions": ours[0]["versions"] | theirs[0]["versions"],
    }
    for name in ("share_of_bandwidth", "bandwidth", "cache_mb", "extra_mb", "peak_mb", "compile_s"):
        record |= {name: median(ours, name), f"peer_{name}": median(theirs, name)}
    if cell.case == "decode" and record["cache_mb"]:
        # A peer's step reads the same weights, and the cache that it has.
        cache = 1e6 * (record["peer_cache_mb"] or record["cache_mb"])
        read = ours[0]["weight_bytes"] + cache
        record["peer_share_of_bandwidth"] = read / (other / 1e3) / record["bandwidth"]
    return {key: value for key, value in record.items() if value is not None}


def line(record: dict[str, Any]) -> str:
    unit = "perplexity" if record["case"] == "perplexity" else "ms"
    return (
        f"{record['peer']}: {record['case']}, {record['policy']}, batch {record['batch']}, "
        f"{record['tokens']} tokens, {record['slots']} kept: {record['peer_' + unit]:.1f} {unit}, "
        f"ours {record[unit]:.1f} ({record['ratio']:.2f})"
    )


def table(records: list[dict[str, Any]]) -> str:
    """All records as Markdown."""
    lines = [
        "| case | policy | batch | tokens | kept | peer | theirs | ours | theirs / ours "
        "| MB beyond weights, theirs / ours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in records:
        unit = "perplexity" if r["case"] == "perplexity" else "ms"
        extra = f"{r['peer_extra_mb']:.0f} / {r['extra_mb']:.0f}" if "extra_mb" in r else ""
        known = (r["case"], r["policy"], r["batch"], r["tokens"], r["slots"], r["peer"])
        found = (f"{r['peer_' + unit]:.1f}", f"{r[unit]:.1f}", f"{r['ratio']:.2f}", extra)
        lines.append(f"| {' | '.join(map(str, known + found))} |")
    return "\n".join(lines)
