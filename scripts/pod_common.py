"""What the scripts about PoD (arXiv 2412.02252) share: arguments, texts, plans, records, tables."""

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from endless import default_text

import jaxkv
from jaxkv.prompts import to_rows


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def parser(description: str) -> Parser:
    """With the arguments that all scripts have."""
    made = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write records here as they come")
    made.add_argument("--quick", action="store_true", help="smaller defaults: about two minutes")
    return made


def model_parser(description: str) -> Parser:
    """The same for scripts that run a model on texts."""
    made = parser(description)
    made.add_argument("--model", default="smollm2-135m")
    made.add_argument(
        "--texts",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="default: Python's own documentation; the last quarter of each is measured on, and "
        "plans are made from the rest",
    )
    return made


@dataclasses.dataclass(frozen=True)
class Option:
    """A numeric argument, its default and the smaller one of `--quick`; lists take several."""

    name: str
    kind: type
    normal: Any
    quick: Any
    what: str


#: Near tokens for texts as short as those measured here; the paper has 16 + 4080.
NEAR = Option("near", int, [16, 240], [16, 112], "how many first and latest tokens do not share")
#: How plans are made. Repairing takes most of the time.
PLAN = [
    Option("explore", int, 4, 2, "texts to explore"),
    Option("explore-length", int, 1024, 512, "tokens of each"),
    Option("returning", float, 0.46875, 0.46875, "share of each that comes again at its end"),
    Option(
        "over", str, "min", "min", "how the query heads of a KV head are put together: min, mean"
    ),
    Option("repair", int, 56, 6, "texts to repair on; 0 leaves repairing out"),
    Option("repair-length", int, 512, 128, "tokens of each"),
]


def add_options(made: Parser, options: Sequence[Option]) -> None:
    for option in options:
        several = isinstance(option.normal, list)
        values = option.normal if several else [option.normal]
        made.add_argument(
            f"--{option.name}",
            type=option.kind,
            nargs="*" if several else None,
            metavar="N",
            help=f"{option.what} (default: {' '.join(map(str, values))})",
        )


def parse(
    made: Parser, options: Sequence[Option], arguments: Sequence[str] | None
) -> argparse.Namespace:
    args = made.parse_args(arguments)
    for option in options:
        name = option.name.replace("-", "_")
        if getattr(args, name) is None:
            setattr(args, name, option.quick if args.quick else option.normal)
    return args


def run(made: Parser, work: Callable[[], None]) -> None:
    """Errors that the caller can mend end the script with one line."""
    try:
        work()
    except (ValueError, RuntimeError, OSError) as error:
        made.error(str(error))


@dataclasses.dataclass(frozen=True)
class Texts:
    """Token ids of texts: the parts that plans are made from, and those that are measured on."""

    fitted: list[list[int]]
    measured: list[list[int]]


def read_texts(args: argparse.Namespace, params: jaxkv.Params) -> Texts:
    """Raises `ValueError` if a file cannot be read, or the model has no tokenizer."""
    if args.texts is None:
        texts = [default_text()]
    else:
        texts = []
        for path in args.texts:
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"cannot read {path}: {error}") from None
    rows, _ = to_rows(params, texts)
    ends = [len(row) * 3 // 4 for row in rows]
    return Texts(
        [row[:end] for row, end in zip(rows, ends, strict=True)],
        [row[end:] for row, end in zip(rows, ends, strict=True)],
    )


def measured_pieces(params: jaxkv.Params, texts: Texts, length: int, count: int) -> list[list[int]]:
    """Pieces of the parts that are measured on, evenly spread."""
    return jaxkv.pod.pieces(params, texts.measured, length, count=count)


def explored(
    args: argparse.Namespace, params: jaxkv.Params, texts: Texts, target_saving: float
) -> jaxkv.PodPlan:
    """A plan, from texts that are not measured on."""
    length = args.explore_length
    rows = jaxkv.pod.pieces(params, texts.fitted, length, count=args.explore)
    if args.returning:
        rows = jaxkv.pod.returning(rows, int(args.returning * length))
    return jaxkv.pod.explore(
        params,
        rows,
        target_saving=target_saving,
        length=length,
        last_rows=min(64, length),
        over=args.over,
    )


def repaired(
    args: argparse.Namespace, params: jaxkv.Params, texts: Texts, plan: jaxkv.PodPlan
) -> jaxkv.PodPlan:
    """The plan with maps, from texts that are not measured on."""
    length = args.repair_length
    rows = jaxkv.pod.pieces(params, texts.fitted, length, count=args.repair)
    return jaxkv.pod.repair(params, plan, rows, length=length)


def sinks_and_recent(args: argparse.Namespace) -> dict[str, int]:
    """`--near`, as `jaxkv.PoD` takes it."""
    if len(args.near) != 2:
        raise ValueError(f"--near takes two numbers, first and latest tokens, got {args.near}")
    return dict(zip(("sinks", "recent"), args.near, strict=True))


class Records:
    """What was measured. A file that is there is whole."""

    def __init__(self, args: argparse.Namespace, **about: Any):
        self.file: Path | None = args.json
        self.about = {
            **about,
            "quick": args.quick,
            "jaxkv": jaxkv.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
        }
        self.all: list[dict[str, Any]] = []
        self.start = time.perf_counter()

    def add(self, told: str, **record: Any) -> dict[str, Any]:
        """Keeps a record, and tells of it on standard error."""
        self.all.append({**record, **self.about})
        seconds = time.perf_counter() - self.start
        print(f"[{seconds:5.0f} s] {told}", file=sys.stderr, flush=True)
        if self.file is not None:
            part = self.file.with_suffix(".part")
            part.write_text("[\n" + ",\n".join(map(json.dumps, self.all)) + "\n]\n")
            os.replace(part, self.file)
        return record


def table(titles: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown: the first column to the left, the others to the right."""
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def list_of(values: Sequence[Any]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def shown(record: Mapping[str, Any], key: str, form: str) -> str:
    """A cell of a table; empty where there is nothing."""
    value = record.get(key)
    return "" if value is None else format(value, form)
