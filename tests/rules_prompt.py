"""Slow, obvious oracles for the eviction methods that compress a prompt (and R-KV).

Like `oracles.py`, this file shares nothing with the library that it judges: it was written from
the published rules and from the methods' public code, in NumPy float64, with loops over heads,
rows and tokens. Each docstring states the rule and where it comes from; where the public code has
a quirk, the docstring says whether it is followed. Never make this file fast.

A rule is a function `rule(view) -> kept`: the sorted kept positions of every KV head (RULES).
A scorer is a function `score(view) -> scores`: one dictionary {position: worth} for every KV head
with an entry for every candidate (SCORERS). A protected token is worth infinity. What a scorer
means as a rule is always the same, `keep`: the newest token, then the best; of equals the older;
exactly min(budget, candidates) tokens for every KV head.

Wrappers (adakv, criticalkv, chunkkv) take another scorer by the option `of`: a name in SCORERS,
or names with slashes from the outside in: adakv with of="criticalkv/snapkv". All of them read the
same `view.options`, each with its own defaults.

In all scorers "row i of head h" is the softmax of query i over everything that it saw: stored
tokens and the block up to itself. A candidate that the row did not see counts as 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rules_driver import View

Scores = list[dict[int, float]]  # per KV head {position: worth}
Kept = list[list[int]]  # per KV head sorted positions
PROTECTED = float("inf")


# ---------------------------------------------------------------- parts


def group(view: View, kv_head: int) -> list[int]:
    """The query heads of a KV head."""
    return [head for head in range(view.heads) if head // view.g == kv_head]


def softmax(logits: list[float]) -> list[float]:
    if not logits:
        return []
    shifted = np.exp(np.array(logits) - max(logits))
    return [float(p) for p in shifted / shifted.sum()]


def rotation(place: int, d: int, theta: float) -> np.ndarray:
    """RoPE as a matrix, half-split as in Llama: entry i turns together with entry i + d/2."""
    half = d // 2
    matrix = np.zeros((d, d))
    for i in range(half):
        angle = place * theta ** (-2.0 * i / d)
        matrix[i, i] = matrix[i + half, i + half] = np.cos(angle)
        matrix[i, i + half] = -np.sin(angle)
        matrix[i + half, i] = np.sin(angle)
    return matrix


def order(scores: dict[int, float]) -> list[int]:
    """One head's candidates from the first to keep to the last: the newest, then the best."""
    newest = max(scores)
    return sorted(scores, key=lambda position: (position != newest, -scores[position], position))


def keep(view: View, scores: Scores) -> Kept:
    """The newest token and the best others, `budget` in all, for every KV head."""
    return [sorted(order(of_head)[: view.budget]) for of_head in scores]


def pool(values: list[float], kernel: int, kind: str) -> list[float]:
    """1-d pooling, stride 1, as many out as in, as torch.nn.functional does it.

    Padding is kernel // 2 on both sides. "avg" (avg_pool1d) pads zeros AND counts them: the
    divisor is `kernel` everywhere, so the ends come out smaller. "max" (max_pool1d) pads minus
    infinity, so at the ends the maximum goes over what is there.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError("the kernel is odd: an even one would not keep the length")
    if kind not in ("avg", "max"):
        raise ValueError(f"unknown pooling {kind!r}")
    half = kernel // 2
    pooled = []
    for i in range(len(values)):
        near = [values[j] for j in range(i - half, i + half + 1) if 0 <= j < len(values)]
        pooled.append(sum(near) / kernel if kind == "avg" else max(near))
    return pooled


def split_window(view: View, kv_head: int, window: int) -> tuple[list[int], list[int]]:
    """The head's candidates in order: (those to be scored, the protected newest ones).

    Protected are the newest min(window, budget) candidates.
    """
    candidates = view.candidates[kv_head]
    protected = min(window, view.budget, len(candidates))
    cut = len(candidates) - protected
    return candidates[:cut], candidates[cut:]


def window_rows(view: View, window: int) -> list[int]:
    """The last `window` query positions of the block; fewer if the block is shorter."""
    return view.block[-window:] if window > 0 else []


# ---------------------------------------------------------------- SnapKV, PyramidKV


def score_snapkv(view: View) -> Scores:
    """SnapKV (Li et al. 2024). Options window=32, kernel=5, pooling="avg" or "max".

    Rows: the last `window` queries of the block. A candidate's value is its probability, summed
    over these rows, then averaged over the query heads of the group, then pooled. The newest
    `window` candidates are protected (min(window, budget) of them) and take no part in pooling.

    Neighbours in pooling are neighbours IN THE CACHE: the candidates sorted by position, however
    far apart they are in the text (in a first prompt both are the same).

    Source: FasterDecoding/SnapKV and KVCache-Factory sum over rows; kvpress takes their mean,
    which orders equally (it matters only to criticalkv's epsilon). The group is averaged before
    pooling as in KVCache-Factory; for the average the order of the two does not matter.
    """
    window = view.options.get("window", 32)
    kernel = view.options.get("kernel", 5)
    pooling = view.options.get("pooling", "avg")
    scores = []
    for kv_head in range(view.kv_heads):
        old, protected = split_window(view, kv_head, window)
        values = []
        for position in old:
            total = 0.0
            for head in group(view, kv_head):
                for row in window_rows(view, window):
                    total += view.rows[row][head].get(position, 0.0)
            values.append(total / view.g)
        of_head = dict(zip(old, pool(values, kernel, pooling), strict=True))
        of_head.update(dict.fromkeys(protected, PROTECTED))
        scores.append(of_head)
    return scores


def pyramidkv_budgets(
    budget: int, num_layers: int, length: int, window: int, beta: int = 20
) -> list[int]:
    """PyramidKV (Cai et al. 2024): budgets per KV head that fall linearly over the layers.

    Of the budget, `window` tokens per layer are the newest ones; B = budget - window are shared.
    min = B // beta, max = 2B - min; if max >= length - window, then max = length - window and
    min = 2B - max. Layer l gets the real number window + max - l * (max - min) / (layers - 1).
    Uniform, `budget` everywhere, for one layer, B <= 0, or a prompt shorter than 2B.

    The public code floors the step and so overshoots. Here the real numbers, whose sum is exactly
    budget * num_layers, are rounded down and the missing tokens go one each to the layers with
    the largest fractions (of equal fractions the lower layer). The sum is exact.
    """
    shared = budget - window
    if num_layers == 1 or shared <= 0 or length < 2 * shared:
        return [budget] * num_layers
    low = shared // beta
    high = 2 * shared - low
    if high >= length - window:
        high = length - window
        low = 2 * shared - high
    if low > high:  # the prompt fits: nothing to share out
        return [budget] * num_layers
    exact = [
        window + high - layer * Fraction(high - low, num_layers - 1) for layer in range(num_layers)
    ]
    budgets = [int(share) for share in exact]  # all are >= 0: int() rounds down
    missing = budget * num_layers - sum(budgets)
    fraction = [exact[layer] - budgets[layer] for layer in range(num_layers)]
    largest = sorted(range(num_layers), key=lambda layer: (-fraction[layer], layer))
    for layer in largest[:missing]:
        budgets[layer] += 1
    return budgets


# ---------------------------------------------------------------- Expected Attention


def score_expected_attention(view: View) -> Scores:
    """Expected Attention (kvpress, expected_attention_press.py; arXiv 2510.00636).

    Options future=512, sinks=4, epsilon=0.0, use_vnorm=True, use_covariance=True.

    Per query head: mean mu and covariance S (divided by the number of rows) of the block's
    UNROTATED queries, without those at positions < sinks (unless the block has no other). R is
    the mean of the rotation matrices of positions n .. n + future - 1, where n follows the newest
    position; mu becomes R mu, S becomes R S R^T. With k the key rotated at its own position

        p = softmax over the candidates at positions >= sinks of  mu.k / sqrt(d) + k.S k / (2 d)

    (the sinks are NOT in the softmax). The mean of p over the group, plus epsilon, times the L2
    norm of the value is the score (without use_vnorm: the mean of p alone, no epsilon).
    Candidates at positions < sinks are protected. The newest token has an ordinary score.
    """
    future = view.options.get("future", 512)
    sinks = view.options.get("sinks", 4)
    epsilon = view.options.get("epsilon", 0.0)
    use_vnorm = view.options.get("use_vnorm", True)
    use_covariance = view.options.get("use_covariance", True)
    d = view.d
    n = view.block[-1] + 1
    mean_rotation = sum(rotation(place, d, view.theta) for place in range(n, n + future)) / future
    used = [position for position in view.block if position >= sinks] or view.block
    scores = []
    for kv_head in range(view.kv_heads):
        sink_tokens = [position for position in view.candidates[kv_head] if position < sinks]
        others = [position for position in view.candidates[kv_head] if position >= sinks]
        total = dict.fromkeys(others, 0.0)
        for head in group(view, kv_head):
            queries = [np.asarray(view.query(position, head)) for position in used]
            mu = sum(queries) / len(queries)
            covariance = sum(np.outer(q - mu, q - mu) for q in queries) / len(queries)
            mu = mean_rotation @ mu
            covariance = mean_rotation @ covariance @ mean_rotation.T
            logits = []
            for position in others:
                key = np.asarray(view.rotated_key(position, kv_head))
                logit = float(mu @ key) / np.sqrt(d)
                if use_covariance:
                    logit += float(key @ covariance @ key) / (2 * d)
                logits.append(logit)
            for position, p in zip(others, softmax(logits), strict=True):
                total[position] += p
        of_head = dict.fromkeys(sink_tokens, PROTECTED)
        for position in others:
            worth = total[position] / view.g
            if use_vnorm:
                worth = (worth + epsilon) * float(np.linalg.norm(view.value(position, kv_head)))
            of_head[position] = worth
        scores.append(of_head)
    return scores


# ---------------------------------------------------------------- KVzip


def score_kvzip(view: View) -> Scores:
    """KVzip (Kim et al. 2025): the greatest probability that a token gets in a reconstruction.

    Option rows: the reconstruction's rows, each a list over query heads of {position: p}. They
    come from a later pass that repeats the text; the caller decides what a row's softmax covers
    (snu-mllab/KVzip: sinks, the chunk's own keys and the repeat input; not the full cache).
    score = max over all rows and over the query heads of the group. A token in no row is worth 0.
    Nothing is protected but, as always, the newest token.

    The official budget is one for all layers and heads; here, it is `budget` per KV head (its
    level "uniform"), or shared over the layer's heads with adakv of kvzip with floor 0.
    """
    scores = []
    for kv_head in range(view.kv_heads):
        of_head = dict.fromkeys(view.candidates[kv_head], 0.0)
        for row in view.options["rows"]:
            for head in group(view, kv_head):
                for position in of_head:
                    of_head[position] = max(of_head[position], row[head].get(position, 0.0))
        scores.append(of_head)
    return scores


# ---------------------------------------------------------------- CAKE


def score_cake(view: View) -> Scores:
    """CAKE's token indicator (Qin et al. 2025; antgroup/cakekv, modify_llama.py).

    Options window=32, kernel=5, gamma=200.0. Per query head and candidate: the mean of its
    probability over the last `window` rows of the block, plus gamma times the variance over
    these rows (unbiased: divided by rows - 1; zero for a single row). Averages pooled along the
    candidates without the newest `window`, as in snapkv; then the mean over the group. The newest
    min(window, budget) are protected.
    """
    window = view.options.get("window", 32)
    kernel = view.options.get("kernel", 5)
    gamma = view.options.get("gamma", 200.0)
    scores = []
    for kv_head in range(view.kv_heads):
        old, protected = split_window(view, kv_head, window)
        of_head = dict.fromkeys(old, 0.0)
        for head in group(view, kv_head):
            values = []
            for position in old:
                mean, variance = mean_and_variance(column(view, window, head, position))
                values.append(mean + gamma * variance)
            for position, value in zip(old, pool(values, kernel, "avg"), strict=True):
                of_head[position] += value / view.g
        of_head.update(dict.fromkeys(protected, PROTECTED))
        scores.append(of_head)
    return scores


def column(view: View, window: int, head: int, position: int) -> list[float]:
    """What the window's rows of a query head give to one position."""
    return [view.rows[row][head].get(position, 0.0) for row in window_rows(view, window)]


def mean_and_variance(values: list[float]) -> tuple[float, float]:
    """Mean and unbiased variance; the variance of a single value is 0."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def cake_preference(view: View) -> float:
    """How much cache CAKE wants for this layer. Options window=32, tau1=1.0, tau2=1.0.

    Over the last `window` rows, all query heads, and each head's candidates but the newest
    min(window, budget) (probabilities as they are, not normalised again after the cut):

        entropy = - sum of p * log(p + 1e-10)
        shift   =   sum over query heads and candidates of the unbiased variance over the rows
        preference = entropy ** (1 / tau1) * shift ** (1 / tau2)
    """
    window = view.options.get("window", 32)
    tau1 = view.options.get("tau1", 1.0)
    tau2 = view.options.get("tau2", 1.0)
    entropy = 0.0
    shift = 0.0
    for kv_head in range(view.kv_heads):
        old, _ = split_window(view, kv_head, window)
        for head in group(view, kv_head):
            for position in old:
                values = column(view, window, head, position)
                entropy -= sum(p * np.log(p + 1e-10) for p in values)
                shift += mean_and_variance(values)[1]
    return float(entropy ** (1 / tau1) * shift ** (1 / tau2))


def cake_budgets(
    preferences: list[float],
    budget: int,
    num_layers: int,
    window: int = 32,
    length: int | None = None,
) -> list[int]:
    """CAKE's budgets per KV head over the layers (antgroup/cakekv, cake/utils.py).

    Of the budget, min(window, budget) per layer are the newest tokens and stay apart; the other
    (budget - window) * num_layers are shared out: preference / sum of preferences * total, cut
    down to an integer. No layer can use more than length - window: what is above goes evenly to
    the layers below that cap, the remainder one each to the first of them. What the rounding left
    over is then shared out in the same way.

    The official code stops here and loses what overflows the cap in these two rounds. Here more
    rounds follow till nothing is left, so the sum is budget * num_layers (with a cap: as much of
    it as fits). Where nothing overflows in the rounds, both agree.
    """
    if len(preferences) != num_layers:
        raise ValueError("one preference per layer")
    window = min(window, budget)
    total = (budget - window) * num_layers
    cap = total if length is None else max(length - window, 0)
    weights = list(preferences) if sum(preferences) > 0 else [1.0] * num_layers
    shares = [int(weight / sum(weights) * total) for weight in weights]

    def share_out(amount: int) -> None:
        below = [layer for layer in range(num_layers) if shares[layer] < cap]
        for rank, layer in enumerate(below):
            shares[layer] += amount // len(below) + (rank < amount % len(below))

    def cut() -> int:
        above = sum(max(share - cap, 0) for share in shares)
        shares[:] = [min(share, cap) for share in shares]
        return above

    share_out(cut())
    share_out(total - sum(shares))
    while cut() and min(shares) < cap:
        share_out(min(total, cap * num_layers) - sum(shares))
    return [window + share for share in shares]


# ---------------------------------------------------------------- R-KV


def score_r_kv(view: View) -> Scores:
    """R-KV (Cai et al. 2025; Zefan-Cai/R-KV, rkv/compression/r1_kv.py and rkv/utils.py).

    Options window=8, lam=0.07, kernel=7, threshold=0.5; the driver reads burst=128.
    "old" are the candidates without the newest min(window, budget), which are protected.

        score(j) = lam * importance(j) - (1 - lam) * redundancy(j)        for j in old

    importance: the last `window` queries since the start (they may lie in several blocks),
    rotated at their own positions, times the rotated keys, / sqrt(d). The MAXIMUM over the group
    is taken of these logits, BEFORE the softmax. The softmax runs over `old` only, the newest
    `window` keys are not in it. Mean over the rows, then max-pooled along `old` (cache order).

    redundancy: over ALL candidates, protected ones too, in cache order, with rotated keys k:
    A[i, j] = k_i.k_j / ((|k_i| + 1e-8) (|k_j| + 1e-8)), A[i, i] = 0. In each row i the newest j
    with A[i, j] > threshold is set to 0 (of the similar ones, the newest is forgiven). A row with
    no such j sets A[i, 0] to 0 instead, the oldest candidate's: an accident of the official code
    (the maximum of an index list filled with zeros), followed here. Then the mean over i, for
    each j, and a softmax over all j.
    """
    window = view.options.get("window", 8)
    lam = view.options.get("lam", 0.07)
    kernel = view.options.get("kernel", 7)
    threshold = view.options.get("threshold", 0.5)
    newest = view.block[-1]
    rows = range(max(newest - window + 1, 0), newest + 1)
    scores = []
    for kv_head in range(view.kv_heads):
        old, protected = split_window(view, kv_head, window)
        keys = {
            position: np.asarray(view.rotated_key(position, kv_head))
            for position in view.candidates[kv_head]
        }
        importance = [0.0] * len(old)
        for row in rows:
            seen = [j for j, position in enumerate(old) if position <= row]
            logits = []
            for j in seen:
                of_group = []
                for head in group(view, kv_head):
                    query = rotation(row, view.d, view.theta) @ view.query(row, head)
                    of_group.append(float(query @ keys[old[j]]) / np.sqrt(view.d))
                logits.append(max(of_group))
            for j, p in zip(seen, softmax(logits), strict=True):
                importance[j] += p / len(rows)
        importance = pool(importance, kernel, "max")
        redundancy = softmax(similarity(list(keys.values()), threshold))
        of_head = dict.fromkeys(protected, PROTECTED)
        for j, position in enumerate(old):  # old comes first in the candidates: the same index
            of_head[position] = lam * importance[j] - (1 - lam) * redundancy[j]
        scores.append(of_head)
    return scores


def similarity(keys: list[np.ndarray], threshold: float) -> list[float]:
    """R-KV's mean similarity of each key to the others; see `score_r_kv`."""
    size = len(keys)
    unit = [key / (np.linalg.norm(key) + 1e-8) for key in keys]
    matrix = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            matrix[i, j] = 0.0 if i == j else float(unit[i] @ unit[j])
    for i in range(size):
        similar = [j for j in range(size) if matrix[i, j] > threshold]
        matrix[i, max(similar, default=0)] = 0.0
    return [float(matrix[:, j].sum() / size) for j in range(size)]


# ---------------------------------------------------------------- wrappers


def inner(view: View) -> Scores:
    """The scores of the scorer that the option `of` names (default snapkv)."""
    first, _, rest = view.options.get("of", "snapkv").partition("/")
    view = copy.copy(view)
    view.options = {**view.options, "of": rest or "snapkv"}
    return SCORERS[first](view)


def adakv(view: View) -> Kept:
    """AdaKV (Feng et al. 2024): one budget for all KV heads of the layer, really freed.

    Options of="snapkv", floor=0.2. The layer holds kv_heads * budget tokens (or all candidates,
    if they are fewer). Every head first takes its own int(floor * budget) best, at least 1, in
    its own order: the newest, then the best. The rest of the layer's tokens go to the best of the
    remaining (head, token) pairs over all heads; of equals the older token, then the lower head.
    Protected tokens are worth infinity and so come first.

    Scores are compared over heads as they are: kvpress (adakv_press.py) does not normalise them.
    FFY0/AdaKV (snapkv_utils.py) has an optional weight per head, and mixes floor and count
    instead of guaranteeing the floor; this is not followed.
    """
    floor = view.options.get("floor", 0.2)
    scores = inner(view)
    heads = range(view.kv_heads)
    total = min(view.kv_heads * view.budget, sum(len(of_head) for of_head in scores))
    kept = [order(scores[head])[: max(int(floor * view.budget), 1)] for head in heads]
    pairs = [
        (-scores[head][position], position, head)
        for head in heads
        for position in scores[head]
        if position not in kept[head]
    ]
    for _, position, head in sorted(pairs)[: total - sum(len(of_head) for of_head in kept)]:
        kept[head].append(position)
    return [sorted(of_head) for of_head in kept]


def score_criticalkv(view: View) -> Scores:
    """CriticalKV (Feng et al. 2025; kvpress, criticalkv_press.py).

    Options of="snapkv", first=0.5, epsilon=1e-4. First stage: the int(budget * first) first
    tokens in the inner order (the newest, then the best; protected ones count) are safe. The
    others are worth (score + epsilon) * the mean over the group of ||W_o^h v||_1, where W_o^h =
    output[:, h*d : (h+1)*d] for query head h, v is the KV head's value, and the norm goes over
    the embedding axis. Protected tokens stay protected beyond the first stage (in kvpress not).
    With of="expected_attention", kvpress wants use_vnorm=False: values must not count twice.

    `epsilon` is also an option of expected_attention; there it acts with use_vnorm only.
    """
    first = view.options.get("first", 0.5)
    epsilon = view.options.get("epsilon", 1e-4)
    d = view.d
    scores = []
    for kv_head, of_head in enumerate(inner(view)):
        safe = order(of_head)[: int(view.budget * first)]
        second = {}
        for position in of_head:
            if position in safe or of_head[position] == PROTECTED:
                second[position] = PROTECTED
                continue
            norm = 0.0
            for head in group(view, kv_head):
                of_query_head = view.output[:, head * d : (head + 1) * d]
                projected = of_query_head @ view.value(position, kv_head)
                norm += float(np.abs(projected).sum()) / view.g
            second[position] = (of_head[position] + epsilon) * norm
        scores.append(second)
    return scores


def score_chunkkv(view: View) -> Scores:
    """ChunkKV (Liu et al. 2025): runs of tokens stay or go together.

    Options of="snapkv", chunk=20. A chunk is the tokens with equal position // chunk. A token is
    worth the mean of the inner scores over its chunk's candidates, protected ones left out of the
    mean; protected tokens stay protected. Best chunks come first, inside a chunk the older tokens:
    the last chunk that fits only in part is cut, so that the budget is met exactly, and each KV
    head has its own chunks. (kvpress, chunkkv_press.py, keeps whole chunks only, and sums their
    means over the KV heads, so that all decide alike.)
    """
    chunk = view.options.get("chunk", 20)
    chunked = []
    for of_head in inner(view):
        members: dict[int, list[float]] = {}
        for position, score in of_head.items():
            if score != PROTECTED:
                members.setdefault(position // chunk, []).append(score)
        means = {index: sum(found) / len(found) for index, found in members.items()}
        chunked.append(
            {
                position: PROTECTED if score == PROTECTED else means[position // chunk]
                for position, score in of_head.items()
            }
        )
    return chunked


SCORERS: dict[str, Callable[[View], Scores]] = {
    "snapkv": score_snapkv,
    "expected_attention": score_expected_attention,
    "kvzip": score_kvzip,
    "cake": score_cake,
    "r_kv": score_r_kv,
    "criticalkv": score_criticalkv,
    "chunkkv": score_chunkkv,
}


def rule_of(scorer: Callable[[View], Scores]) -> Callable[[View], Kept]:
    def rule(view: View) -> Kept:
        return keep(view, scorer(view))

    rule.__doc__ = scorer.__doc__
    return rule


# pyramidkv's and cake's budgets differ by layer: ask with budget = what *_budgets gives the layer
RULES: dict[str, Callable[[View], Kept]] = {
    **{name: rule_of(scorer) for name, scorer in SCORERS.items()},
    "pyramidkv": rule_of(score_snapkv),
    "adakv": adakv,
}
