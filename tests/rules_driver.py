"""The driver under `rules.py` and `rules_prompt.py`: one layer, one sequence, any eviction rule.

Like `oracles.py` it shares nothing with the library that it judges, uses NumPy in float64 only, and
takes the most literal road: loops over blocks, heads and tokens. Never make it fast.

There are `kv_heads` KV heads with `g` query heads each; query head h belongs to KV head h // g.
Every KV head keeps its own tokens. Queries, keys and values come already computed, before rotation.
The sequence is cut into blocks (for example [40, 1, 1, 1]: a prompt of 40, then three decode
steps). For every block:

1. the block's tokens attend (softmax of q k / sqrt(d)) to what is stored and, causally, to the
   block itself. Under a rule that only reads less, a step reads what `select` names, and itself;
2. if a KV head holds more than the budget, the rule says what stays. The rest is gone for good.

A step is a block of length 1 that is not the first block, unless `steps` says otherwise: a row of a
batch may get one token in a block that has room for more. The newest token always stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Row = list[dict[int, float]]  # per query head: position -> a number
Rule = Callable[["View"], list[list[int]]]  # the kept positions of each KV head
Select = Callable[["View", int, int], set[int]]  # view, query position, query head

POSITION_MODES = ("original", "rolling", "ceiling")
DROP_MODES = ("always", "prompt", "bursts", "never")


def rotate(vector: np.ndarray, place: int, theta: float) -> np.ndarray:
    """RoPE, half-split as in Llama: entry i turns together with entry i + d/2."""
    half = len(vector) // 2
    angle = place * theta ** (-2.0 * np.arange(half) / len(vector))
    first, second = vector[:half], vector[half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


def softmax(logits: Iterable[float]) -> np.ndarray:
    logits = np.array(list(logits), dtype=np.float64)
    shifted = np.exp(logits - logits.max())
    return shifted / shifted.sum()


@dataclass
class View:
    """What a rule may look at, after the block was read. A select sees it with `rows` empty."""

    budget: int  # tokens per KV head
    stored: list[list[int]]  # per KV head, sorted: what was stored before the block
    candidates: list[list[int]]  # per KV head, sorted: stored + block
    block: list[int]
    step: bool
    rows: dict[int, Row]  # rows[i][h] = {position: probability}, query positions of this block
    history: dict[int, Row]  # the same for every query position since the start
    logits: dict[int, Row]  # like rows: the scaled logits before the softmax
    all_logits: dict[int, Row]  # like history
    g: int
    kv_heads: int
    heads: int
    d: int
    theta: float
    output: np.ndarray | None  # W_o [embed, heads * d]
    layer: int
    num_layers: int
    options: dict[str, Any]
    memory: dict[Any, Any]  # a rule's own, kept over the blocks
    positions: str
    queries: np.ndarray = field(repr=False)
    keys: np.ndarray = field(repr=False)
    values: np.ndarray = field(repr=False)

    def query(self, position: int, head: int) -> np.ndarray:
        return self.queries[position, head]

    def key(self, position: int, kv_head: int) -> np.ndarray:
        return self.keys[position, kv_head]

    def value(self, position: int, kv_head: int) -> np.ndarray:
        return self.values[position, kv_head]

    def rotated_query(self, position: int, head: int) -> np.ndarray:
        """Rotated at the original position, whatever the position mode."""
        return rotate(self.query(position, head), position, self.theta)

    def rotated_key(self, position: int, kv_head: int) -> np.ndarray:
        """Rotated at the original position, whatever the position mode."""
        return rotate(self.key(position, kv_head), position, self.theta)

    def group(self, kv_head: int) -> list[int]:
        """The query heads of a KV head."""
        return [head for head in range(self.heads) if head // self.g == kv_head]

    def place(self, position: int, kv_head: int) -> int:
        """Rolling: stored tokens stand at 0..m-1 by age, the block's i-th token at m + i."""
        stored = self.stored[kv_head]
        if position in stored:
            return stored.index(position)
        return len(stored) + self.block.index(position)

    def logit(self, i: int, j: int, head: int) -> float:
        """The scaled logit of query position i, query head `head`, and the token at j."""
        query, key = self.query(i, head), self.key(j, head // self.g)
        if self.positions == "rolling":
            query = rotate(query, self.place(i, head // self.g), self.theta)
            key = rotate(key, self.place(j, head // self.g), self.theta)
        elif self.positions == "ceiling" and i - j >= self.options["limit"]:
            query = rotate(query, self.options["limit"], self.theta)  # the key stays unrotated
        else:
            query, key = rotate(query, i, self.theta), rotate(key, j, self.theta)
        return float(query @ key) / np.sqrt(self.d)


@dataclass
class Trace:
    """`kept[b][kv_head]` after block b; `read[b][head]`: what a step read (with a select)."""

    outputs: np.ndarray
    kept: list[list[list[int]]] = field(default_factory=list)
    read: list[list[list[int]] | None] = field(default_factory=list)


def must_drop(view: View, drops: str) -> bool:
    """Whether the rule is asked after this block.

    "always": whenever a KV head exceeds the budget. "prompt": the same, but never after a step.
    "bursts": after other blocks the same, after a step as soon as a KV head holds
    budget + options["burst"] tokens. "never": never.
    """
    most = max(len(positions) for positions in view.candidates)
    if drops == "never":
        return False
    if view.step and drops == "prompt":
        return False
    if view.step and drops == "bursts":
        return most >= view.budget + view.options["burst"]
    return most > view.budget


def run(
    rule: Rule | None,
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    blocks: list[int],
    budget: int,
    options: dict[str, Any] | None = None,
    output: np.ndarray | None = None,
    layer: int = 0,
    num_layers: int = 1,
    positions: str = "original",
    drops: str = "always",
    select: Select | None = None,
    theta: float = 10000.0,
    steps: list[bool] | None = None,
) -> Trace:
    """Run one sequence through one layer: queries [n, heads, d], keys, values [n, kv_heads, d].

    Positions "ceiling" (LM-Infinite): at a distance below options["limit"] the ordinary rotation,
    from there on the key unrotated and the query rotated at `limit`.
    """
    queries = np.asarray(queries, dtype=np.float64)
    keys = np.asarray(keys, dtype=np.float64)
    values = np.asarray(values, dtype=np.float64)
    n, heads, d = queries.shape
    kv_heads = keys.shape[1]
    if keys.shape != (n, kv_heads, d) or values.shape != (n, kv_heads, d):
        raise ValueError("keys and values are [n, kv_heads, d], queries [n, heads, d]")
    if heads % kv_heads or d % 2:
        raise ValueError("equal groups of query heads, and an even head dim")
    if sum(blocks) != n or min(blocks) < 1:
        raise ValueError("blocks are lengths of at least 1 that sum to n")
    if positions not in POSITION_MODES or drops not in DROP_MODES:
        raise ValueError(f"unknown mode {positions!r} or {drops!r}")

    if steps is None:
        steps = [length == 1 and number > 0 for number, length in enumerate(blocks)]
    g = heads // kv_heads
    trace = Trace(outputs=np.zeros((n, heads, d)))
    held: list[list[int]] = [[] for _ in range(kv_heads)]
    history: dict[int, Row] = {}
    all_logits: dict[int, Row] = {}
    memory: dict[Any, Any] = {}
    start = 0
    for length, step in zip(blocks, steps, strict=True):
        block = list(range(start, start + length))
        start += length
        view = View(
            budget=budget,
            stored=held,
            candidates=[stored + block for stored in held],
            block=block,
            step=step,
            rows={},
            history=history,
            logits={},
            all_logits=all_logits,
            g=g,
            kv_heads=kv_heads,
            heads=heads,
            d=d,
            theta=theta,
            output=output,
            layer=layer,
            num_layers=num_layers,
            options=dict(options or {}),
            memory=memory,
            positions=positions,
            queries=queries,
            keys=keys,
            values=values,
        )
        rows: dict[int, Row] = {}
        read: list[list[int]] | None = [] if view.step and select is not None else None
        for now in block:
            rows[now] = []
            view.logits[now] = []
            for head in range(heads):
                stored = held[head // g]
                visible = stored + [position for position in block if position <= now]
                if view.step and select is not None:
                    chosen = select(view, now, head)
                    visible = [position for position in stored if position in chosen] + [now]
                    read.append(visible)
                logits = [view.logit(now, position, head) for position in visible]
                probabilities = softmax(logits)
                out = np.zeros(d)
                for probability, position in zip(probabilities, visible, strict=True):
                    out += probability * view.value(position, head // g)
                trace.outputs[now, head] = out
                rows[now].append(dict(zip(visible, map(float, probabilities), strict=True)))
                view.logits[now].append(dict(zip(visible, logits, strict=True)))
        view.rows = rows
        history.update(rows)
        all_logits.update(view.logits)
        held = [list(tokens) for tokens in view.candidates]
        if must_drop(view, drops):
            held = [sorted(kept) for kept in rule(view)]
            for kept, candidates in zip(held, view.candidates, strict=True):
                assert len(kept) == len(set(kept))
                assert set(kept) <= set(candidates)
                assert block[-1] in kept
        trace.kept.append([list(kept) for kept in held])
        trace.read.append(read)
    return trace
