"""A slow, obvious oracle for PoD: keys of distant tokens shared between layers.

Written from the rules of "Compressing KV Cache for Long-Context LLM Inference with Inter-Layer
Attention Similarity" (arXiv 2412.02252), next to `oracles.py`, whose choice of the tokens that stay
it uses. NumPy in float64, loops over blocks, layers, heads and tokens.

`run` takes ONE sequence of t tokens through all layers and returns a `Trace`:

- queries [layers, t, heads, d], keys and values [layers, t, kv_heads, d], rotated already: no
  position turns anything here. Query head h belongs to KV head h // (heads // kv_heads).
- root[layer][kv_head] <= layer: the layer whose keys the head uses for distant tokens. A head with
  root == layer is a root; the others follow one (a root is never itself a follower).
- sinks, recent: a token at j is near a query at i if j < sinks or i - j < recent, else distant. The
  logit is q_i . k_j / sqrt(d) with the layer's own query and key; for a follower and a distant
  token, with the layer's far query and the key of the root layer's same KV head. One softmax over
  all visible j <= i; values are always the layer's own.
- far_queries, as queries: what the queries are for distant tokens; the queries unless given.
- window: j is visible only if i - j < window (None: every j <= i).
- blocks: lengths that sum to t (None: one block). Every block attends to what is stored and,
  causally, to itself; when all layers have attended, every KV head drops tokens.
- rule: one `oracles.Rule`, or rule[layer][kv_head] (None: nothing is dropped; `positions` is not
  used). Roots choose by it, h2o by the probability that tokens received from the KV head's query
  heads in the root layer. Followers ignore theirs and keep what their root's same KV head keeps.
- skip: (form, tau), for followers in blocks of one token. A query head's gate is
  sigmoid(lse_near - lse_far), of the log-sum-exp of its near and its distant logits. If all query
  heads of the KV head have gate >= tau, all of them attend to near tokens alone. "exact" takes its
  lse_far; "predicted" that of the same query head in the root layer (its own queries and keys, the
  same step). Without distant tokens there is nothing to skip.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from oracles import Rule, Token, choose, softmax


@dataclass
class Trace:
    """What happened. `kept[b][layer][kv_head]` are the positions stored after block b, sorted."""

    outputs: np.ndarray  # [layers, t, heads, d]
    kept: list[list[list[list[int]]]] = field(default_factory=list)
    far_parts: int = 0  # (layer, KV head, step): followers with distant tokens, one-token blocks
    skipped: int = 0  # how many of these were left out
    # with skip, by (layer, KV head, position): the smallest gate of the query heads, which decides
    gates: dict[tuple[int, int, int], float] = field(default_factory=dict)


@dataclass
class Case:
    queries: np.ndarray
    far_queries: np.ndarray
    root: list[list[int]]
    sinks: int
    recent: int
    window: float
    skip: tuple[str, float] | None
    group: int  # query heads of one KV head
    caches: list[list[dict[int, Token]]]  # [layer][kv_head]: position -> what is stored


def is_near(case: Case, i: int, j: int) -> bool:
    return j < case.sinks or i - j < case.recent


def logit(case: Case, layer: int, head: int, i: int, j: int) -> float:
    kv_head = head // case.group
    root = case.root[layer][kv_head]
    if root == layer or is_near(case, i, j):
        query, key = case.queries[layer, i, head], case.caches[layer][kv_head][j].key
    else:
        query, key = case.far_queries[layer, i, head], case.caches[root][kv_head][j].key
    return float(query @ key) / np.sqrt(len(query))


def log_sum_exp(logits: list[float]) -> float:
    top = max(logits)
    return top + np.log(sum(np.exp(x - top) for x in logits))


def gate(case: Case, form: str, layer: int, head: int, i: int, near: list, far: list) -> float:
    """The near tokens' share of the probability; predicted: with the root's distant tokens."""
    source = layer if form == "exact" else case.root[layer][head // case.group]
    lse_near = log_sum_exp([logit(case, layer, head, i, j) for j in near])
    lse_far = log_sum_exp([logit(case, source, head, i, j) for j in far])
    return 1 / (1 + np.exp(lse_far - lse_near))


def check(queries, keys, values, far_queries, root, blocks, skip, recent) -> None:
    layers, t, heads, d = queries.shape
    kv_heads = keys.shape[2]
    if keys.shape != (layers, t, kv_heads, d) or values.shape != keys.shape:
        raise ValueError("keys and values are [layers, t, kv_heads, d]")
    if far_queries.shape != queries.shape or heads % kv_heads:
        raise ValueError("far_queries are like queries; heads are a multiple of kv_heads")
    if len(root) != layers or any(len(row) != kv_heads for row in root):
        raise ValueError("root is [layers][kv_heads]")
    for layer, row in enumerate(root):
        for head, source in enumerate(row):
            if not 0 <= source <= layer or root[source][head] != source:
                raise ValueError(f"layer {layer}, KV head {head} follows {source}: not a root")
    if sum(blocks) != t or min(blocks, default=1) < 1:
        raise ValueError("blocks are lengths of at least 1 that sum to t")
    if skip is not None and (skip[0] not in ("exact", "predicted") or recent < 1):
        raise ValueError("skip is (exact or predicted, tau), with recent >= 1 (something is near)")


def attend(case: Case, layer: int, kv_head: int, i: int, step: bool, trace: Trace) -> None:
    """One query position of one KV head: fill the outputs, add the probabilities to the scores."""
    cache = case.caches[layer][kv_head]
    query_heads = range(kv_head * case.group, (kv_head + 1) * case.group)
    visible = [j for j in sorted(cache) if j <= i and i - j < case.window]
    near = [j for j in visible if is_near(case, i, j)]
    far = [j for j in visible if not is_near(case, i, j)]
    if step and far and case.root[layer][kv_head] != layer:
        trace.far_parts += 1
        if case.skip is not None:
            form, tau = case.skip
            smallest = min(gate(case, form, layer, head, i, near, far) for head in query_heads)
            trace.gates[layer, kv_head, i] = smallest
            if smallest >= tau:
                trace.skipped += 1
                visible = near
    for head in query_heads:
        p = softmax([logit(case, layer, head, i, j) for j in visible])
        for probability, j in zip(p, visible, strict=True):
            trace.outputs[layer, i, head] += probability * cache[j].value
            cache[j].score += float(probability)


def drop(case: Case, rules) -> None:
    for layer, row in enumerate(case.caches):
        for kv_head, cache in enumerate(row):
            root = case.root[layer][kv_head]
            if root == layer:
                kept = choose(rules[layer][kv_head], cache, kv_head)
            else:
                kept = list(case.caches[root][kv_head])  # root < layer: it has dropped already
            for j in set(cache) - set(kept):
                del cache[j]


def run(queries, keys, values, root, sinks, recent, *, far_queries=None, window=None, blocks=None,
        rule=None, skip=None) -> Trace:  # fmt: skip
    queries, keys, values = (np.asarray(a, dtype=np.float64) for a in (queries, keys, values))
    far_queries = queries if far_queries is None else np.asarray(far_queries, dtype=np.float64)
    blocks = [queries.shape[1]] if blocks is None else blocks
    check(queries, keys, values, far_queries, root, blocks, skip, recent)
    window = np.inf if window is None else window
    layers, kv_heads, group = len(keys), keys.shape[2], queries.shape[2] // keys.shape[2]
    rule = Rule("full", 0) if rule is None else rule
    rules = [[rule] * kv_heads] * layers if isinstance(rule, Rule) else rule

    caches: list[list[dict[int, Token]]] = [[{} for _ in range(kv_heads)] for _ in range(layers)]
    case = Case(queries, far_queries, root, sinks, recent, window, skip, group, caches)
    trace = Trace(outputs=np.zeros(queries.shape))
    start = 0
    for length in blocks:
        for layer in range(layers):
            for kv_head in range(kv_heads):
                for j in range(start, start + length):
                    key, value = keys[layer, j, kv_head], values[layer, j, kv_head]
                    caches[layer][kv_head][j] = Token(key, value)
                for i in range(start, start + length):
                    attend(case, layer, kv_head, i, length == 1, trace)
        drop(case, rules)
        trace.kept.append([[sorted(cache) for cache in row] for row in caches])
        start += length
    return trace


def greedy_roots(similarity, threshold: float) -> list[int]:
    """Root of every layer of one head; a block grows while similarity[first][next] allows it."""
    first, roots = 0, []
    for layer in range(len(similarity)):
        if layer > first and similarity[first][layer] < threshold:
            first = layer
        roots.append(first)
    return roots


def jensen_shannon_bits(p, q) -> float:
    """The Jensen-Shannon divergence of two probability vectors: 0 equal, 1 disjoint."""
    total = 0.0
    for a, b in zip(np.asarray(p, np.float64), np.asarray(q, np.float64), strict=True):
        total += sum(x * np.log2(x / ((a + b) / 2)) / 2 for x in (a, b) if x > 0)
    return float(min(max(total, 0.0), 1.0))  # rounding may step over the ends


def nominal_saving(root) -> float:
    """The share of the cache that followers' keys are, as if all of their tokens were distant."""
    shared = sum(source != layer for layer, row in enumerate(root) for source in row)
    return shared / (2 * len(root) * len(root[0]))


def saving(root, length: int, sinks: int, recent: int) -> float:
    """The share of the keys and values of `length` tokens that need not be stored."""
    return nominal_saving(root) * max(0, length - sinks - recent) / length
