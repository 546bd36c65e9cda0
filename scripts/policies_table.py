"""What policies cost in quality: perplexity and needles under every policy, in one table.

    python scripts/policies_table.py --out results                 # an hour on two cores
    python scripts/policies_table.py --quick --policies full h2o snapkv --out results

Writes `policies.json` (one record per measurement, saved as they come: `--resume` goes on after a
run that was stopped), `policies.md` and `policies.png` (see `policies_report.py`). Measured are

- decode: perplexity of a text fed one token at a time, for policies that drop tokens at steps or
  select what a step reads; budgets are fractions of the text;
- prompt: perplexity of what follows a prompt that was read at once; fractions of the prompt;
- needle, needle-aware: `jaxkv.evaluate.needle.needle_grid`, the question unknown or known when the
  context is compressed; fractions of the context.

All texts and budgets of a policy are rows of one batch, so a policy is compiled once. `kept` are
the tokens stored per KV head in the end, `cache_bytes` what the cache of one text takes alone.
"""

import argparse
import dataclasses
import hashlib
import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
from policies_report import PROTOCOLS, list_of, report
from rich.console import Console

import jaxkv
from jaxkv import analyze
from jaxkv.evaluate.needle import needle_grid
from jaxkv.evaluate.perplexity import perplexities
from jaxkv.policies import DuoAttention, KVzap, Policy, get, registered

#: Chosen so that all policies take about an hour on two cores, mostly of compiling and prompts.
NORMAL = {
    "budgets": [0.1, 0.2, 0.5],
    "decode_tokens": 512,
    "tokens": 1024,
    "prompt": 768,
    "needle_budgets": [0.2],
    "needle_lengths": [512],
    "needles": 2,
    "depths": [0.0, 0.25, 0.5, 0.75, 1.0],
}
QUICK = {
    "budgets": [0.2, 0.5],
    "decode_tokens": 128,
    "tokens": 256,
    "prompt": 192,
    "needle_budgets": [0.2],
    "needle_lengths": [256],
    "needles": 1,
    "depths": [0.0, 0.5, 1.0],
}


@dataclasses.dataclass(frozen=True)
class Source:
    """A text, as token ids."""

    name: str
    ids: list[int]

    def digest(self, count: int) -> str:
        """Tells whether the first `count` tokens are those of an earlier run."""
        return hashlib.sha256(json.dumps(self.ids[:count]).encode()).hexdigest()[:12]


def python_documentation() -> str:
    """A text that is on every machine: what Python's `help()` says of its topics."""
    topics = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


class Measuring:
    """Runs measurements and keeps their records."""

    def __init__(self, args: argparse.Namespace, params: jaxkv.Params, sources: list[Source]):
        self.args, self.params, self.sources = args, params, sources
        self.file: Path = args.out / "policies.json"
        self.records: list[dict[str, Any]] = []
        if args.resume and self.file.exists():
            # What was skipped is tried again: that costs nothing.
            self.records = [r for r in json.loads(self.file.read_text()) if "value" in r]
        self.made: dict[str, Policy] = {}

    def policy(self, name: str) -> Policy:
        """A policy by name, with what it has to know of the model.

        Raises:
          ValueError: it cannot be made for this model.

        """
        if name not in self.made:
            if name == DuoAttention.name:
                # Of the authors' 64 first tokens fewer, so that small budgets are possible.
                made = DuoAttention(retrieval=analyze.retrieval_heads(self.params), sinks=16)
            elif name == KVzap.name:
                made = KVzap(surrogate=analyze.fit_surrogate(self.params, self._other_texts()))
            else:
                made = get(name)
            self.made[name] = made
        return self.made[name]

    def _other_texts(self) -> list[list[int]]:
        """Parts of the texts that perplexity is not measured on."""
        count, size = (5, 128) if self.args.quick else (10, 512)
        start = max(self.args.tokens, self.args.decode_tokens)
        parts = []
        for number in range(count):
            ids = self.sources[number % len(self.sources)].ids[start + number * size :][:size]
            if len(ids) == size:
                parts.append(ids)
        return parts

    def jobs(self) -> Iterator[tuple[str, str]]:
        for name in self.args.policies:
            for protocol in self.args.protocols:
                yield name, protocol

    def run(self, name: str, protocol: str) -> str:
        """Measures what is missing; gives a line to print."""
        start = time.perf_counter()
        kind = get(name)
        bounded = kind.drops != "never" or kind.selects != "all" or kind.simulates
        if kind.simulates and protocol != "decode":
            return f"{name}, {protocol}: left out, it scores whole texts only"
        drops_at_steps = kind.drops in ("always", "bursts") or kind.selects != "all"
        if protocol == "decode" and bounded and not drops_at_steps and not kind.simulates:
            return f"{name}, {protocol}: left out, it drops tokens at prompts only"
        needle = protocol.startswith("needle")
        budgets = self.args.needle_budgets if needle else self.args.budgets
        budgets = list(budgets) if bounded else [1.0]
        measure = self._needles if needle else self._perplexities
        try:
            told = measure(self.policy(name), protocol, budgets)
        except ValueError as error:
            self._add(policy=name, protocol=protocol, skipped=str(error))
            return f"{name}, {protocol}: left out, {error}"
        return f"{name}, {protocol}: {told}, {time.perf_counter() - start:.0f} s"

    def _perplexities(self, policy: Policy, protocol: str, budgets: list[float]) -> str:
        prompt = self.args.prompt if protocol == "prompt" else 0
        tokens = self.args.tokens if prompt else self.args.decode_tokens
        cases: dict[float, list[dict[str, Any]]] = {}
        refused = []
        config = self.params.config
        for budget in budgets:
            try:
                sized = policy.with_budget(budget)
                sized.budgets(prompt or tokens, config.num_layers, config.num_kv_heads)
            except ValueError as error:
                refused.append(f"{budget:.0%} left out ({error})")
                self._add(policy=policy.name, protocol=protocol, budget=budget, skipped=str(error))
                continue
            cases[budget] = [
                {
                    "policy": policy.name,
                    "protocol": protocol,
                    "budget": budget,
                    "text": source.name,
                    "digest": source.digest(tokens),
                    "tokens": tokens,
                    "prompt": prompt,
                }
                for source in self.sources
            ]
        missing = [b for b, rows in cases.items() if not all(map(self._has, rows))]
        if missing:
            found = perplexities(
                self.params,
                [source.ids[:tokens] for source in self.sources],
                policy=policy,
                budgets=missing,
                prompt=prompt,
            )
            for budget, row in zip(missing, found, strict=True):
                for case, scored in zip(cases[budget], row, strict=True):
                    self._add(
                        **case,
                        repr=repr(policy.with_budget(budget)),
                        value=scored.perplexity,
                        accuracy=scored.accuracy,
                        kept=scored.kept,
                        cache_bytes=scored.cache_bytes,
                    )
        parts = [f"{b:.0%} " + " ".join(map(self._told, rows)) for b, rows in cases.items()]
        return "; ".join(parts + refused)

    def _needles(self, policy: Policy, protocol: str, budgets: list[float]) -> str:
        args, source, told = self.args, self.sources[0], []
        for budget in budgets:
            case = {
                "policy": policy.name,
                "protocol": protocol,
                "budget": budget,
                "text": source.name,
                "digest": source.digest(len(source.ids)),
                "lengths": args.needle_lengths,
                "depths": args.depths,
                "needles": args.needles,
            }
            if not self._has(case):
                grid = needle_grid(
                    self.params,
                    source.ids,
                    policy=policy,
                    budget=budget,
                    lengths=args.needle_lengths,
                    depths=args.depths,
                    needles=args.needles,
                    aware=protocol == "needle-aware",
                )
                self._add(
                    **case,
                    repr=repr(grid.policy),
                    value=grid.score,
                    found=grid.found,
                    logprob=grid.logprob,
                    logprobs=grid.logprobs,
                    kept=grid.kept,
                )
            told.append(f"{budget:.0%} found {self._told(case)}")
        return "; ".join(told)

    def _told(self, case: dict[str, Any]) -> str:
        record = self._has(case)
        return "" if record is None else f"{record['value']:.2f}"

    def _has(self, case: dict[str, Any]) -> dict[str, Any] | None:
        """The record of a measurement, if there is one."""
        wanted = {**case, **self._versions()}
        for record in self.records:
            if "value" in record and all(record.get(k) == v for k, v in wanted.items()):
                return record
        return None

    def _versions(self) -> dict[str, str]:
        return {"model": self.args.model, "jaxkv": jaxkv.__version__, "jax": jax.__version__}

    def _add(self, **record: Any) -> None:
        self.records.append({**record, **self._versions(), "python": platform.python_version()})
        # A file that is there is whole.
        part = self.file.with_suffix(".part")
        part.write_text("[\n" + ",\n".join(map(json.dumps, self.records)) + "\n]\n")
        os.replace(part, self.file)


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--texts",
        nargs="+",
        action="extend",
        type=Path,
        metavar="FILE",
        help="default: Python's own documentation; needles are hidden in the first",
    )
    parser.add_argument("--policies", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument(
        "--protocols",
        nargs="+",
        default=list(PROTOCOLS),
        metavar="NAME",
        help=f"default: {' '.join(PROTOCOLS)}",
    )
    fraction, whole = _number(float, 0, 1), _number(int, 1, 10**9)
    share = _number(float, 0, 1, least=True)
    for name, kind, what in (
        ("budgets", fraction, "of tokens kept, for perplexity"),
        ("decode-tokens", whole, "tokens of a text for `decode`"),
        ("tokens", whole, "tokens of a text for `prompt`, its prompt included"),
        ("prompt", whole, "tokens of the prompt"),
        ("needle-budgets", fraction, "for needles; a program is compiled for each"),
        ("needle-lengths", whole, "tokens of a haystack"),
        ("needles", whole, "at each length and depth"),
        ("depths", share, "of needles"),
    ):
        default = NORMAL[name.replace("-", "_")]
        several = isinstance(default, list)
        shown = list_of(default if several else [default])
        parser.add_argument(
            f"--{name}",
            type=kind,
            nargs="+" if several else None,
            help=f"{what} (default: {shown})",
        )
    parser.add_argument("--quick", action="store_true", help="smaller defaults, minutes")
    parser.add_argument("--resume", action="store_true", help="go on in --out")
    parser.add_argument("--out", type=Path, default=Path("policies"), metavar="FOLDER")
    args = parser.parse_args()
    for name, value in (QUICK if args.quick else NORMAL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.policies = args.policies or list(registered())
    known = {"policies": registered(), "protocols": PROTOCOLS}
    for what, names in known.items():
        wrong = [name for name in getattr(args, what) if name not in names]
        if wrong:
            parser.error(f"unknown {what}: {', '.join(wrong)}; there are {', '.join(names)}")
    if args.prompt >= args.tokens:
        parser.error(f"--prompt must be less than --tokens, got {args.prompt} and {args.tokens}")
    if (args.out / "policies.json").exists() and not args.resume:
        parser.error(f"{args.out}/policies.json exists: give --resume, or another --out")
    args.parser = parser
    return args


def _number(kind: type, above: float, most: float, *, least: bool = False) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = -1
        if not (above <= value <= most) or (value == above and not least and kind is float):
            raise argparse.ArgumentTypeError(
                f"must be {'an int' if kind is int else 'a number'} "
                f"{'>= 1' if kind is int else 'in [0, 1]' if least else 'in (0, 1]'}, got {text!r}"
            )
        return value

    return parse


def read_texts(args: argparse.Namespace, params: jaxkv.Params) -> list[Source]:
    """The texts, of as many tokens as are needed.

    Raises:
      ValueError: one is too short, or cannot be read.

    """
    if params.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer")
    found = {"python documentation": python_documentation()} if not args.texts else {}
    for path in args.texts or []:
        try:
            found[path.stem] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {path}: {error}") from None
    sources = [Source(name, params.tokenizer.encode(text)) for name, text in found.items()]
    least = max(args.tokens, args.decode_tokens, *args.needle_lengths)
    for source in sources:
        if len(source.ids) < least:
            raise ValueError(f"{source.name} has {len(source.ids)} tokens, {least} are needed")
    return sources


def main() -> None:
    args = parse()
    console = Console(highlight=False)
    try:
        params = jaxkv.load(args.model)
        measuring = Measuring(args, params, read_texts(args, params))
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, RuntimeError, OSError) as error:
        args.parser.error(str(error))
    jobs, start = list(measuring.jobs()), time.perf_counter()
    for done, (name, protocol) in enumerate(jobs, 1):
        told = measuring.run(name, protocol)
        minutes = (time.perf_counter() - start) / 60
        console.print(f"{done}/{len(jobs)}, {minutes:.0f} min: {told}", soft_wrap=True)
    report(measuring.records, args.out, console)


if __name__ == "__main__":
    main()
