"""Slow, obvious oracles for the other eviction rules, next to `oracles.py`.

This file shares nothing with the library that it judges. It was written from the papers and from
what their public code does, uses NumPy in float64 only, and takes the most literal road: loops
over heads and tokens. Read it next to the rules; never make it fast. `rules_driver.py` has the
setting, `View` and `run`.

Of equals the older token is kept, unless a rule says "newer first". The newest token is always kept
and counts in the budget; where a part of the budget is larger than the budget, it is cut. A KV head
that is within the budget keeps all. [ours]: the public code has no such thing; our own choice.

Two kinds of rules: rule(view) -> kept positions per KV head, and select(view, position, head) ->
the stored positions that this step's query head reads (nothing is ever dropped then). H2O's task
scoring works on a whole sequence at once: `lm_eval_mask` and `lm_eval_outputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from rules_driver import Rule, View, rotate, softmax


def newest(positions: list[int], count: int) -> list[int]:
    return sorted(positions, reverse=True)[: max(count, 0)]


def best(positions: list[int], count: int, worth: Callable[[int], Any]) -> list[int]:
    """The `count` positions worth most; of equals the older ones."""
    by_age = sorted(positions)
    return sorted(by_age, key=worth, reverse=True)[: max(count, 0)]  # a stable sort


def best_newer(positions: list[int], count: int, worth: Callable[[int], Any]) -> list[int]:
    """The `count` positions worth most; of equals the newer ones."""
    return best(positions, count, worth=lambda position: (worth(position), position))


def without(positions: list[int], gone: Iterable[int]) -> list[int]:
    gone = set(gone)
    return [position for position in positions if position not in gone]


def per_head(view: View, choose: Callable[[int, list[int]], list[int]]) -> list[list[int]]:
    """Ask `choose(kv_head, candidates)` for every KV head that is over the budget."""
    kept = []
    for kv_head, positions in enumerate(view.candidates):
        if len(positions) <= view.budget:
            kept.append(list(positions))
            continue
        chosen = choose(kv_head, list(positions))
        assert len(chosen) == len(set(chosen)) == view.budget
        kept.append(sorted(chosen))
    return kept


def recent_and_best(
    view: View, positions: list[int], recent: int, worth: Callable[[int], float]
) -> list[int]:
    """The `recent` newest (at least one), and the best of the others."""
    kept = newest(positions, min(max(recent, 1), view.budget))
    return kept + best(without(positions, kept), view.budget - len(kept), worth)


def attention_sums(view: View, kv_head: int, group: str = "sum") -> dict[int, float]:
    """Per candidate the sum over all query rows so far; each row reduced over the group first.

    A token's first row is its own: it starts with the probability that it gave itself.
    """
    reduce = {"sum": np.sum, "mean": np.mean, "max": np.max}[group]
    sums = dict.fromkeys(view.candidates[kv_head], 0.0)
    for row in view.history.values():
        for position in sums:
            seen = [row[head].get(position, 0.0) for head in view.group(kv_head)]
            sums[position] += float(reduce(seen))
    return sums


# ---------------------------------------------------------------- H2O (FMInference/H2O, NeurIPS 23)


def h2o(view: View) -> list[list[int]]:
    """H2O: the `recent` newest, and of the others the best by accumulated attention.

    Options: recent, group = "sum" | "mean" | "max" (over the query heads of a KV head), mode.

    "real_drop", "rolling": one rule; the second is run with positions = "rolling".

    "flexgen_ring" (the throughput code; there heavy = K, recent = K - 1, budget 2K - 1): the heavy
    part and a ring of the `recent` newest. A prompt fills them as real_drop does: the `recent`
    newest and the best budget - recent of the others. At a step the new token takes the slot of the
    ring's oldest, which moves into the heavy part unconditionally, and the lowest sum among the
    heavy tokens that were there before goes. So after a step stay: the `recent` newest, the token
    that has just left the ring, and all but the lowest of the old heavy part.

    That is NOT real_drop with the same split (there the leaving token competes, and may go at
    once). It is real_drop with `recent` at a prompt and with recent + 1 at steps, the budget being
    the same. The code knows one prompt and steps; a longer later block is read as a prompt [ours].
    """
    recent = view.options["recent"]
    if view.options.get("mode", "real_drop") == "flexgen_ring" and view.step:
        recent += 1

    def choose(kv_head: int, positions: list[int]) -> list[int]:
        sums = attention_sums(view, kv_head, view.options.get("group", "sum"))
        return recent_and_best(view, positions, recent, sums.__getitem__)

    return per_head(view, choose)


def select_h2o_mask(view: View, now: int, head: int) -> set[int]:
    """H2O's simulated eviction (utils_hh): nothing is freed, a step reads heavy + recent tokens.

    Options: heavy, recent, forget. While no more than heavy + recent tokens are stored, a step
    reads all. From then on:

    - The step's own token is one of the `recent`: recent - 1 stored ones are read beside it.
    - The `heavy` best by accumulated attention are taken from the stored tokens before the
      `recent` newest stored ones. Therefore the recent-th newest stored token is in neither part,
      for this one step; at the next it competes with its sum intact.
    - forget (True is the public code): whoever competes and loses has its sum set to 0. False: its
      sum stays as it is. While only steps follow that is the same: a loser's sum is frozen, and
      `heavy` others have at least as much for good, so a masked token never comes back. It can
      after a later long block, which reads everything; the code does not provide for one.

    Sums grow only by what is read. All query heads of a KV head add up and read the same [ours].
    With recent = 0 the code hides the step's token from itself; here it is always read.
    """
    heavy, recent = view.options["heavy"], view.options["recent"]
    kv_head = head // view.g
    chosen_before = view.memory.setdefault(("chosen", kv_head), {})
    if now in chosen_before:
        return chosen_before[now]

    sums = view.memory.setdefault(("sums", kv_head), {})
    added = view.memory.setdefault(("added", kv_head), set())
    for i, row in view.history.items():
        if i not in added:
            added.add(i)
            for member in view.group(kv_head):
                for position, probability in row[member].items():
                    sums[position] = sums.get(position, 0.0) + probability

    stored = view.stored[kv_head]
    if len(stored) <= heavy + recent:
        chosen = set(stored)
    else:
        local = newest(stored, recent - 1)
        competing = without(stored, newest(stored, recent))
        winners = best(competing, heavy, sums.__getitem__)
        chosen = set(local) | set(winners)
        if view.options.get("forget", True):
            for position in without(competing, winners):
                sums[position] = 0.0
    chosen_before[now] = chosen
    return chosen


def causal_rows(
    queries: np.ndarray, keys: np.ndarray, theta: float
) -> tuple[np.ndarray, np.ndarray]:
    """Logits (minus infinity in the future) and probabilities, both [heads, n, n]."""
    n, heads, d = queries.shape
    g = heads // keys.shape[1]
    logits = np.full((heads, n, n), -np.inf)
    probabilities = np.zeros((heads, n, n))
    for head in range(heads):
        turned = [rotate(keys[j, head // g], j, theta) for j in range(n)]
        for i in range(n):
            query = rotate(queries[i, head], i, theta)
            for j in range(i + 1):
                logits[head, i, j] = float(query @ turned[j]) / np.sqrt(d)
            probabilities[head, i, : i + 1] = softmax(logits[head, i, : i + 1])
    return logits, probabilities


def lm_eval_mask(
    queries: np.ndarray,
    keys: np.ndarray,
    heavy: int,
    recent: int,
    statistic: str = "local",
    theta: float = 10000.0,
) -> np.ndarray:
    """H2O's task scoring (utils_lm_eval), [kv_heads, n, n]: True where row i sees token j.

    Recent: i - j <= recent, which is recent + 1 tokens with itself. Heavy, by sums of the rows of
    the UNMASKED causal attention (added over the query heads of a KV head [ours]):

    - "local" (OPT, GPT-NeoX): the first `heavy` rows see all of their past, and their columns'
      sums are the start. Row t from `heavy` on sees the heavy - 1 best sums and itself; only then
      is its row added, and whatever row t did not see as heavy drops to 0. A token thus enters
      with its own probability alone, and one that has lost as heavy never comes back, even if it
      is still recent. A row sees at most heavy + recent tokens.
    - "global" (what the LLaMA file runs): the `heavy` largest column sums over ALL rows, the
      future ones too, for every row. A row sees at most heavy + recent + 1 tokens.
    """
    n, heads, _ = queries.shape
    kv_heads = keys.shape[1]
    _, probabilities = causal_rows(np.asarray(queries, float), np.asarray(keys, float), theta)
    mask = np.zeros((kv_heads, n, n), dtype=bool)
    for kv_head in range(kv_heads):
        members = [head for head in range(heads) if head // (heads // kv_heads) == kv_head]
        rows = sum(probabilities[head] for head in members)  # [n, n]
        if statistic == "global":
            mask[kv_head][:, best(list(range(n)), heavy, rows.sum(axis=0).__getitem__)] = True
        elif heavy > 0:
            sums = {j: float(rows[:heavy, j].sum()) for j in range(min(heavy, n))}
            mask[kv_head, :heavy, :heavy] = True
            for t in range(heavy, n):
                sees = [*best(list(sums), heavy - 1, sums.__getitem__), t]
                mask[kv_head, t, sees] = True
                sums = {j: sums.get(j, 0.0) + float(rows[t, j]) for j in sees}
        for i in range(n):
            mask[kv_head, i, max(0, i - recent) : i + 1] = True
            mask[kv_head, i, i + 1 :] = False
    return mask


def lm_eval_outputs(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    heavy: int,
    recent: int,
    statistic: str = "local",
    theta: float = 10000.0,
) -> np.ndarray:
    """[n, heads, d]: attention over what `lm_eval_mask` shows, the softmax taken anew."""
    n, heads, d = queries.shape
    g = heads // keys.shape[1]
    mask = lm_eval_mask(queries, keys, heavy, recent, statistic, theta)
    logits, _ = causal_rows(np.asarray(queries, float), np.asarray(keys, float), theta)
    outputs = np.zeros((n, heads, d))
    for head in range(heads):
        for i in range(n):
            seen = [j for j in range(n) if mask[head // g, i, j]]
            for j, probability in zip(seen, softmax(logits[head, i, seen]), strict=True):
                outputs[i, head] += probability * values[j, head // g]
    return outputs


# -------------------------------------------------------------------------- patterns by position


def window(view: View) -> list[list[int]]:
    """The newest."""
    return per_head(view, lambda _, positions: newest(positions, view.budget))


def strided(view: View) -> list[list[int]]:
    """Sparse Transformer, strided (Child et al. 2019), on absolute positions [ours].

    budget - budget // 2 newest. Of the others with `stride`: positions divisible by it, newer
    first, then the rest, newer first. stride = None: by the largest power of two that divides the
    position (position 0 above all), of equals the newer first.
    """
    stride = view.options.get("stride")

    def worth(position: int) -> float:
        if stride is not None:
            return float(position % stride == 0)
        if position == 0:
            return np.inf
        power = 1
        while position % (2 * power) == 0:
            power *= 2
        return power

    def choose(_: int, positions: list[int]) -> list[int]:
        kept = newest(positions, view.budget - view.budget // 2)
        return kept + best_newer(without(positions, kept), view.budget - len(kept), worth)

    return per_head(view, choose)


def fixed(view: View) -> list[list[int]]:
    """Sparse Transformer, fixed (Child et al. 2019), on absolute positions [ours].

    Blocks of `block` positions (None: budget // 2, at least 1). First the tokens of the newest
    token's block, newer first (they all stay, if the budget holds them). Of the others with
    summary = None: by the place in the own block, the nearest to its end first; with summary = c:
    the last c of each block first. Of equals the newer first.
    """
    length = view.options.get("block") or max(1, view.budget // 2)
    summary = view.options.get("summary")

    def choose(_: int, positions: list[int]) -> list[int]:
        here = max(positions) // length

        def worth(position: int) -> tuple[bool, int]:
            place = position % length
            if position // length == here:
                return (True, 0)
            return (False, place if summary is None else int(place >= length - summary))

        return best_newer(positions, view.budget, worth)

    return per_head(view, choose)


def plus_heavy(view: View) -> list[list[int]]:
    """Heavy hitters as a plug-in to a pattern (the H2O paper); the total stays the budget [ours].

    Options: of (a rule's name; its own options stand beside), heavy. The pattern chooses as if
    budget - heavy were its budget (at least 1: the newest); the places left go to the rest's
    highest sums of attention.
    """
    pattern_budget = max(1, view.budget - view.options["heavy"])
    pattern = RULES[view.options["of"]](replace(view, budget=pattern_budget))

    def choose(kv_head: int, positions: list[int]) -> list[int]:
        kept = pattern[kv_head]
        sums = attention_sums(view, kv_head)
        rest = without(positions, kept)
        return kept + best(rest, view.budget - len(kept), sums.__getitem__)

    return per_head(view, choose)


def lm_infinite(view: View) -> list[list[int]]:
    """LM-Infinite: positions below `globals` (4), and the newest others.

    With positions = "ceiling" and options["limit"] a far token is seen at that distance. If the
    budget is at most `globals`: the newest, and the first budget - 1.
    """
    first = view.options.get("globals", 4)

    def choose(_: int, positions: list[int]) -> list[int]:
        kept = newest(positions, 1)
        others = without(positions, kept)
        kept += sorted(position for position in others if position < first)[: view.budget - 1]
        return kept + newest(without(others, kept), view.budget - len(kept))

    return per_head(view, choose)


def duo_attention(view: View) -> list[list[int]]:
    """DuoAttention: retrieval heads keep all, the others the first `sinks` and `recent` newest.

    Options: retrieval (a bool per KV head), sinks, recent. Not bounded by the budget, which only
    says when to ask: run it with budget = sinks + recent. `recent` = 0 keeps the newest in the
    place of the last sink (of at least one token in all).
    """
    sinks, recent = view.options["sinks"], view.options["recent"]
    total = max(1, sinks + recent)
    kept = []
    for kv_head, positions in enumerate(view.candidates):
        if view.options["retrieval"][kv_head] or len(positions) <= total:
            kept.append(list(positions))
            continue
        local = newest(positions, max(recent, 1))
        kept.append(sorted(without(positions, local)[: total - len(local)] + local))
    return kept


# -------------------------------------------------------------------------- rules by attention


def tova(view: View) -> list[list[int]]:
    """TOVA: the best by the newest query's attention, averaged over ALL query heads of the layer.

    Every KV head keeps the same tokens. The public code does not protect the newest; here it stays.
    """
    row = view.rows[view.block[-1]]

    def worth(position: int) -> float:
        return float(np.mean([row[head].get(position, 0.0) for head in range(view.heads)]))

    return per_head(view, lambda _, positions: recent_and_best(view, positions, 1, worth))


def scissorhands(view: View) -> list[list[int]]:
    """Scissorhands: the fewest rows in which the token got less than the row's mean.

    Options: recent (10 newest, protected). A row of a query head counts against a token that it
    saw with a probability below 1 / (number of tokens that the row saw). All rows since the start,
    all query heads of the KV head. The authors have no public code.
    """

    def choose(kv_head: int, positions: list[int]) -> list[int]:
        misses = dict.fromkeys(positions, 0)
        for row in view.history.values():
            for head in view.group(kv_head):
                for position, probability in row[head].items():
                    if position in misses and probability < 1 / len(row[head]):
                        misses[position] += 1
        recent = view.options.get("recent", 10)
        return recent_and_best(view, positions, recent, lambda position: -misses[position])

    return per_head(view, choose)


def keyformer(view: View) -> list[list[int]]:
    """Keyformer: the sum over all rows of softmax((logit + noise) / tau) over what the row saw.

    Options: recent (newest, protected), noise(position, kv_head), tau_start (1), tau_end (2),
    steps. tau of the query at position i: linear from tau_start at 0 to tau_end at `steps`, then
    constant. The noise is fixed per token [ours]: the public code draws Gumbel noise anew for
    every row, and its tau grows per generated token, the prompt having tau_start. Query heads of
    a KV head add up [ours].
    """
    start, end = view.options.get("tau_start", 1.0), view.options.get("tau_end", 2.0)

    def choose(kv_head: int, positions: list[int]) -> list[int]:
        sums = dict.fromkeys(positions, 0.0)
        for i, row in view.all_logits.items():
            tau = start + (end - start) * min(1.0, i / view.options["steps"])
            for head in view.group(kv_head):
                noisy = [x + view.options["noise"](j, kv_head) for j, x in row[head].items()]
                for j, share in zip(row[head], softmax([x / tau for x in noisy]), strict=True):
                    if j in sums:
                        sums[j] += float(share)
        return recent_and_best(view, positions, view.options["recent"], sums.__getitem__)

    return per_head(view, choose)


# ------------------------------------------------------------------------------- rules by keys


def knorm(view: View) -> list[list[int]]:
    """Knorm: the smallest L2 norms of keys (rotation does not change them)."""

    def choose(kv_head: int, positions: list[int]) -> list[int]:
        def worth(position: int) -> float:
            return -float(np.sqrt((view.key(position, kv_head) ** 2).sum()))

        return recent_and_best(view, positions, 1, worth)

    return per_head(view, choose)


def keydiff(view: View) -> list[list[int]]:
    """KeyDiff as in kvpress: the lowest cosine to the anchor, on keys rotated where they stand.

    k'_j = k_j / |k_j|; anchor = mean of k'_j over all candidates of this KV head, the newest one
    included, not normalised again; worth_j = -(k_j . anchor) / (|k_j| |anchor|).
    """

    def choose(kv_head: int, positions: list[int]) -> list[int]:
        unit = {}
        for position in positions:
            key = view.rotated_key(position, kv_head)
            unit[position] = key / np.sqrt((key**2).sum())
        anchor = sum(unit.values()) / len(unit)
        length = np.sqrt((anchor**2).sum())
        return recent_and_best(view, positions, 1, lambda j: -float(unit[j] @ anchor / length))

    return per_head(view, choose)


# --------------------------------------------------------------- rules that only read less


def select_topk(view: View, now: int, head: int) -> set[int]:
    """Top-K (the H2O paper's baseline): the k tokens of highest current logit, per query head.

    Options: k. The step's own token competes and takes one of the k places if it is among them;
    if not, it is read in addition: k + 1 tokens in all.
    """
    everyone = [*view.stored[head // view.g], now]
    chosen = best(everyone, view.options["k"], lambda position: view.logit(now, position, head))
    return set(without(chosen, [now]))


def select_quest(view: View, now: int, head: int) -> set[int]:
    """Quest: the best max(3, budget // page) pages, the new token's own among them.

    Options: page (16), dense_layers (0; the paper has 2): layers below read all. A page is a run
    of positions with equal position // page. Its score for a KV head: the maximum over the query
    heads of the group of sum over d of max(q_d min_d, q_d max_d), with query and keys rotated. The
    new token's page is always read and counts as one; of equals the older page.

    The public kernels count the last page in token_budget // page, without the minimum of 3; the
    public evaluation has that minimum but does not force the last page. Both per query head.
    """
    page, kv_head = view.options.get("page", 16), head // view.g
    stored = view.stored[kv_head]
    if view.layer < view.options.get("dense_layers", 0):
        return set(stored)

    def score(number: int) -> float:
        keys = [view.rotated_key(j, kv_head) for j in stored if j // page == number]
        low, high = np.min(keys, axis=0), np.max(keys, axis=0)
        per_query_head = []
        for member in view.group(kv_head):
            query = view.rotated_query(now, member)
            per_query_head.append(float(np.maximum(query * low, query * high).sum()))
        return max(per_query_head)

    own = now // page
    others = sorted({j // page for j in stored} - {own})
    chosen = {own, *best(others, max(3, view.budget // page) - 1, score)}
    return {j for j in stored if j // page in chosen}


RULES: dict[str, Rule] = {
    "window": window,
    "h2o": h2o,
    "strided": strided,
    "fixed": fixed,
    "plus_heavy": plus_heavy,
    "tova": tova,
    "scissorhands": scissorhands,
    "keyformer": keyformer,
    "knorm": knorm,
    "keydiff": keydiff,
    "lm_infinite": lm_infinite,
    "duo_attention": duo_attention,
}
