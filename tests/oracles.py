"""Slow, obvious oracles for KV-cache eviction, written from the published rules.

This file shares nothing with the library that it judges: it was written from the rules of H2O
(Zhang et al. 2023) and StreamingLLM (Xiao et al. 2024), uses NumPy in float64 only, and takes the
most literal road: loops over blocks, heads and tokens. Read it next to the rules; never make it
fast.

The setting is one attention layer and ONE sequence. There are `kv_heads` KV heads with `g` query
heads each; query head h belongs to KV head h // g. Every KV head keeps its own tokens. Queries,
keys and values come already computed, before rotation. The sequence is cut into blocks (for
example [8, 1, 1, 1]: a prompt of 8 tokens, then three decode steps). For every block:

1. the block's tokens attend to what is stored and, causally, to the block itself, up to and
   including the own position;
2. every probability is added to the score of the token that it fell on;
3. the policy keeps `budget` tokens of stored + block. The rest is gone for good.

Policies (`Rule.name`), always in the case where there are more tokens than the budget:

- full       everything; the budget is ignored.
- window     the newest `budget`.
- streaming  the first `sinks` positions, and the newest of the others.
- h2o        the `recent` newest, and the best of the others by score.
- heavy      by score alone: h2o with recent = 1.
- random     by `priority(position, kv_head)`, the larger number being worth more.

Under each of them the newest token is kept and counts in the budget, and of equals the older one
is kept. Where a part of the budget is larger than the budget, it is cut: h2o with recent > budget
is a window, and streaming with sinks >= budget keeps the newest and the first budget - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

POLICIES = ("full", "window", "streaming", "h2o", "heavy", "random")
POSITION_MODES = ("original", "rolling", "none")


@dataclass(frozen=True)
class Rule:
    """A policy, its budget (stored tokens per KV head after a block), and a position mode."""

    name: str
    budget: int
    sinks: int = 4
    recent: int = 0
    positions: str = "original"
    priority: Callable[[int, int], float] | None = None

    def __post_init__(self):
        if self.name not in POLICIES:
            raise ValueError(f"unknown policy {self.name!r}")
        if self.positions not in POSITION_MODES:
            raise ValueError(f"unknown position mode {self.positions!r}")
        if self.name != "full" and self.budget < 1:
            raise ValueError("the newest token is always kept: the budget is at least 1")
        if self.sinks < 0 or self.recent < 0:
            raise ValueError("sinks and recent are at least 0")
        if self.name == "random" and self.priority is None:
            raise ValueError("random needs a priority function")


@dataclass
class Token:
    """What a KV head remembers of one token. The key is not rotated."""

    key: np.ndarray
    value: np.ndarray
    score: float = 0.0


@dataclass
class Trace:
    """What happened. `kept[b][head]` and `scores[b][head]` are the state after block b."""

    outputs: np.ndarray
    kept: list[list[list[int]]] = field(default_factory=list)
    scores: list[list[dict[int, float]]] = field(default_factory=list)


def rotate(vector: np.ndarray, place: int, theta: float) -> np.ndarray:
    """RoPE, half-split as in Llama: entry i turns together with entry i + d/2."""
    d = len(vector)
    half = d // 2
    out = np.empty(d)
    for i in range(half):
        angle = place * theta ** (-2.0 * i / d)
        c, s = np.cos(angle), np.sin(angle)
        out[i] = vector[i] * c - vector[i + half] * s
        out[i + half] = vector[i + half] * c + vector[i] * s
    return out


def softmax(logits: list[float]) -> np.ndarray:
    shifted = np.exp(np.array(logits) - max(logits))
    return shifted / shifted.sum()


def places(stored: list[int], block: list[int], mode: str) -> dict[int, int] | None:
    """Position -> the place at which a token is rotated while this block attends."""
    if mode == "none":
        return None
    if mode == "original":
        return {position: position for position in stored + block}
    # rolling: stored tokens stand at 0..m-1 by age, the block's i-th token at m + i
    place = {position: rank for rank, position in enumerate(sorted(stored))}
    for i, position in enumerate(block):
        place[position] = len(stored) + i
    return place


def attend(
    rule: Rule,
    cache: dict[int, Token],
    stored: list[int],
    block: list[int],
    queries: np.ndarray,
    query_heads: list[int],
    outputs: np.ndarray,
    theta: float,
) -> None:
    """One KV head, one block: fill `outputs`, add the probabilities to the scores.

    `cache` holds the stored tokens and the block's own.
    """
    place = places(stored, block, rule.positions)

    def turned(vector, position):
        return vector if place is None else rotate(vector, place[position], theta)

    keys = {position: turned(cache[position].key, position) for position in stored + block}
    d = queries.shape[-1]
    for now in block:
        visible = stored + [position for position in block if position <= now]
        for head in query_heads:
            query = turned(queries[now, head], now)
            p = softmax([float(query @ keys[position]) / np.sqrt(d) for position in visible])
            out = np.zeros(d)
            for probability, position in zip(p, visible, strict=True):
                out += probability * cache[position].value
                cache[position].score += float(probability)
            outputs[now, head] = out


def best(positions: list[int], count: int, worth: Callable[[int], float]) -> list[int]:
    """The `count` positions worth most; of equals the older ones."""
    order = sorted(positions, key=lambda position: (-worth(position), position))
    return order[: max(count, 0)]


def keep_window(positions: list[int], rule: Rule) -> list[int]:
    return best(positions, rule.budget, worth=lambda position: position)


def keep_streaming(positions: list[int], rule: Rule) -> list[int]:
    newest = max(positions)
    others = [position for position in positions if position != newest]
    sinks = [position for position in others if position < rule.sinks]
    rest = [position for position in others if position >= rule.sinks]
    kept = [newest]
    kept += best(sinks, rule.budget - len(kept), worth=lambda position: 0)
    kept += best(rest, rule.budget - len(kept), worth=lambda position: position)
    return kept


def keep_h2o(positions: list[int], rule: Rule, recent: int, scores: dict[int, float]) -> list[int]:
    newest = max(positions)
    recent = min(max(recent, 1), rule.budget)  # the newest is kept, even with recent = 0
    kept = [position for position in positions if position > newest - recent]
    others = [position for position in positions if position <= newest - recent]
    kept += best(others, rule.budget - len(kept), worth=lambda position: scores[position])
    return kept


def keep_by_priority(positions: list[int], rule: Rule, kv_head: int) -> list[int]:
    newest = max(positions)
    others = [position for position in positions if position != newest]
    kept = [newest]
    kept += best(others, rule.budget - 1, worth=lambda position: rule.priority(position, kv_head))
    return kept


def choose(rule: Rule, cache: dict[int, Token], kv_head: int) -> list[int]:
    """The positions that this KV head keeps of stored + block, sorted."""
    positions = sorted(cache)
    if rule.name == "full" or len(positions) <= rule.budget:
        return positions
    scores = {position: cache[position].score for position in positions}
    if rule.name == "window":
        kept = keep_window(positions, rule)
    elif rule.name == "streaming":
        kept = keep_streaming(positions, rule)
    elif rule.name == "h2o":
        kept = keep_h2o(positions, rule, rule.recent, scores)
    elif rule.name == "heavy":
        kept = keep_h2o(positions, rule, 1, scores)
    else:
        kept = keep_by_priority(positions, rule, kv_head)
    assert len(kept) == len(set(kept)) == rule.budget
    assert max(positions) in kept
    return sorted(kept)


def run(
    rule: Rule,
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    blocks: list[int],
    theta: float = 10000.0,
) -> Trace:
    """Run one sequence through one layer: queries [n, heads, d], keys, values [n, kv_heads, d]."""
    queries = np.asarray(queries, dtype=np.float64)
    keys = np.asarray(keys, dtype=np.float64)
    values = np.asarray(values, dtype=np.float64)
    n, heads, d = queries.shape
    kv_heads = keys.shape[1]
    if keys.shape != (n, kv_heads, d) or values.shape != (n, kv_heads, d):
        raise ValueError("keys and values are [n, kv_heads, d], queries [n, heads, d]")
    if heads % kv_heads:
        raise ValueError("every KV head has the same number of query heads")
    if rule.positions != "none" and d % 2:
        raise ValueError("rotation needs an even head dim")
    if sum(blocks) != n or min(blocks, default=1) < 1:
        raise ValueError("blocks are lengths of at least 1 that sum to n")

    g = heads // kv_heads
    caches: list[dict[int, Token]] = [{} for _ in range(kv_heads)]
    trace = Trace(outputs=np.zeros((n, heads, d)))
    start = 0
    for length in blocks:
        block = list(range(start, start + length))
        start += length
        trace.kept.append([])
        trace.scores.append([])
        for kv_head in range(kv_heads):
            cache = caches[kv_head]
            stored = sorted(cache)
            for position in block:
                cache[position] = Token(keys[position, kv_head], values[position, kv_head])
            query_heads = [head for head in range(heads) if head // g == kv_head]
            attend(rule, cache, stored, block, queries, query_heads, trace.outputs, theta)
            kept = choose(rule, cache, kv_head)
            for position in list(cache):
                if position not in kept:
                    del cache[position]
            trace.kept[-1].append(kept)
            trace.scores[-1].append({position: cache[position].score for position in kept})
    return trace
