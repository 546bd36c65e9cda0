"""`explore`: which layers of a model attend alike, and so may share keys."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.attention import visible
from jaxkv.cache import Cache
from jaxkv.models.params import Params
from jaxkv.pod.plan import SIMILARITY_DIGITS, PodPlan
from jaxkv.pod.texts import cut
from jaxkv.policies.base import Policy, Tokens
from jaxkv.prefill import read
from jaxkv.progress import each
from jaxkv.room import plan as make_room

REFERENCES = ("first", "all")
OVER = ("mean", "min")


def explore(
    params: Params,
    texts: Sequence[Any],
    *,
    threshold: float = 0.5,
    target_saving: float | None = None,
    length: int = 1024,
    last_rows: int = 64,
    reference: Literal["first", "all"] = "first",
    over: Literal["mean", "min"] = "mean",
    log_base: float = 2.0,
) -> PodPlan:
    """Finds blocks of consecutive layers that attend alike, head by head.

    Two layers are as similar as 1 minus the Jensen-Shannon divergence of their attention, averaged
    over the last rows of the texts. From the bottom up, a block starts at a layer and grows while
    the next one is similar enough; the block's first layer is its root, whose keys are used (PoD,
    arXiv 2412.02252; log base, reference and how heads are put together are choices of ours, since
    the paper does not state them).

    The model reads one text after the other, and its keys and last queries are kept. Attention is
    made from them again for each pair of layers, so that rows of two layers are in memory at once.

    Args:
      params: the model.
      texts: strings or token ids; each is used up to `length` tokens.
      threshold: similarity from which layers share, in [0, 1].
      target_saving: chooses the threshold: the highest under which this share of all keys and
        values is not stored (for texts without end), in (0, 0.5).
      length: tokens of each text.
      last_rows: queries at the end of each text whose attention is compared.
      reference: a layer is compared with the "first" of the block, or with "all" of its layers.
      over: how the query heads of a KV head are put together.
      log_base: of the divergence; with 2 similarity lies in [0, 1].

    Returns:
      The plan, with the similarity of all pairs of layers.

    Raises:
      ValueError: an argument is out of range, or there is no text, or one is shorter than
        `last_rows`, or no threshold reaches the saving.

    """
    _check(threshold, target_saving, last_rows, reference, over, log_base)
    rows = cut(params, texts, length, at_least=last_rows, why=f"last_rows={last_rows}")
    found = similarities(params, rows, last_rows=last_rows, log_base=log_base)
    # As they are saved, so that a threshold gives the same plan again.
    alike = found.mean(-1) if over == "mean" else found.min(-1)
    alike = np.round(alike.astype(np.float64), SIMILARITY_DIGITS)
    if target_saving is not None:
        threshold = _threshold_for(alike, target_saving, reference)
    return PodPlan.for_config(
        _roots(alike, threshold, reference),
        params.config,
        model=params.name,
        settings={
            "threshold": float(threshold),
            "target_saving": target_saving,
            "texts": len(rows),
            "tokens": sum(map(len, rows)),
            "length": length,
            "last_rows": last_rows,
            "reference": reference,
            "over": over,
            "log_base": log_base,
        },
        similarity=alike,
    )


def replan(plan: PodPlan, *, threshold: float = 0.5, target_saving: float | None = None) -> PodPlan:
    """The plan of another threshold, from the similarities that a plan holds: no text is read.

    Args:
      plan: from `explore`. Its maps are not those of the new plan, which has none.
      threshold, target_saving: as for `explore`.

    Raises:
      ValueError: the plan holds no similarities, or an argument is out of range, or no threshold
        reaches the saving.

    """
    if plan.similarity is None:
        raise ValueError("the plan holds no similarities: it was not made by jaxkv.pod.explore")
    reference = plan.settings.get("reference", REFERENCES[0])
    _check(threshold, target_saving, 1, reference, OVER[0], 2.0)
    if target_saving is not None:
        threshold = _threshold_for(plan.similarity, target_saving, reference)
    kept = {name: value for name, value in plan.settings.items() if name != "repair"}
    wanted = {"threshold": float(threshold), "target_saving": target_saving}
    root = tuple(map(tuple, _roots(plan.similarity, threshold, reference)))
    return dataclasses.replace(plan, root=root, settings={**kept, **wanted}, maps=None)


def similarities(
    params: Params, rows: Sequence[Sequence[int]], *, last_rows: int, log_base: float = 2.0
) -> Float[np.ndarray, "layers layers kv_heads group"]:
    """Similarity of all pairs of layers, of every query head, as the mean over texts."""
    config = params.config
    total = np.zeros(
        (
            config.num_layers,
            config.num_layers,
            config.num_kv_heads,
            config.num_heads // config.num_kv_heads,
        )
    )
    windows = getattr(config, "windows", ()) or (None,) * config.num_layers
    for row in each(rows, "exploring"):
        cache = _read(params, row, max(map(len, rows)), last_rows)
        for first in range(config.num_layers):
            rows_of_first = _attention(cache, first, windows[first])
            for second in range(first + 1, config.num_layers):
                apart = _divergence(rows_of_first, _attention(cache, second, windows[second]))
                total[first, second] += 1 - np.asarray(apart) / np.log(log_base)
    total /= len(rows)
    total += np.swapaxes(total, 0, 1)
    total[np.arange(config.num_layers), np.arange(config.num_layers)] = 1.0
    return total


def _read(params: Params, row: Sequence[int], room: int, last_rows: int) -> Cache:
    policy = _Watcher(rows=last_rows)
    planned = make_room(params, policy, [room], new=room, grow=0)
    return read(params, planned, [row])[1]


@dataclasses.dataclass(frozen=True)
class _Watcher(Policy):
    """Keeps every token, and the last queries."""

    budget: int | float = 1.0
    rows: int = 64

    drops: ClassVar[Literal["never"]] = "never"

    @property
    def recent_queries(self) -> int:  # type: ignore[override]
        return self.rows

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return jnp.zeros(tokens.positions.shape, jnp.float32)


def _attention(cache: Cache, index: int, window: int | None) -> Array:
    layer = cache.layers[index]
    return _rows(layer.queries[0], layer.keys[0], layer.positions[0, 0], cache.length[0], window)


@jax.jit(static_argnames=("window",))
def _rows(
    queries: Float[Array, "kv_heads group rows dim"],
    keys: Float[Array, "kv_heads slots dim"],
    positions: Int[Array, " slots"],
    length: Int[Array, ""],
    window: int | None,
) -> Float[Array, "kv_heads group rows slots"]:
    """Attention of the last rows, which lie in a ring by their position."""
    count = queries.shape[2]
    last = length - 1
    own = last - (last - jnp.arange(count)) % count
    seen = visible(own, positions, window)
    logits = jnp.einsum("kgtd,ksd->kgts", queries, keys, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(seen, logits * queries.shape[-1] ** -0.5, -jnp.inf), -1)


@jax.jit
def _divergence(
    first: Float[Array, "kv_heads group rows slots"],
    second: Float[Array, "kv_heads group rows slots"],
) -> Float[Array, "kv_heads group"]:
    """Mean Jensen-Shannon divergence of rows, in nats."""

    def entropy(p: Array) -> Array:
        return -jnp.sum(jax.scipy.special.xlogy(p, p), -1)

    apart = entropy((first + second) / 2) - (entropy(first) + entropy(second)) / 2
    return jnp.mean(apart, -1)


def _roots(alike: np.ndarray, threshold: float, reference: str) -> list[list[int]]:
    """Blocks of `[layers, layers, kv_heads]`, from the bottom up."""
    layers, _, kv_heads = alike.shape
    roots = [[0] * kv_heads for _ in range(layers)]
    for head in range(kv_heads):
        root = 0
        for layer in range(1, layers):
            against = slice(root, root + 1) if reference == "first" else slice(root, layer)
            if alike[against, layer, head].min() < threshold:
                root = layer
            roots[layer][head] = root
    return roots


def _threshold_for(alike: np.ndarray, target: float, reference: str) -> float:
    """The highest threshold under which the saving reaches the target."""
    layers, _, kv_heads = alike.shape
    for threshold in sorted(np.unique(alike[np.triu_indices(layers, 1)]), reverse=True):
        roots = _roots(alike, threshold, reference)
        shared = sum(root != layer for layer, row in enumerate(roots) for root in row)
        if shared / (2 * layers * kv_heads) >= target:
            return float(threshold)
    most = (layers - 1) / (2 * layers)
    raise ValueError(
        f"target_saving={target} cannot be reached: if all layers shared, {most:.3f} would be saved"
    )


def _check(
    threshold: float,
    target_saving: float | None,
    last_rows: int,
    reference: str,
    over: str,
    log_base: float,
) -> None:
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must be a number in [0, 1], got {threshold!r}")
    if target_saving is not None and not 0 < target_saving < 0.5:
        raise ValueError(
            f"target_saving must be a number in (0, 0.5), since only keys are shared, got "
            f"{target_saving!r}"
        )
    if type(last_rows) is not int or last_rows < 1:
        raise ValueError(f"last_rows must be an int >= 1, got {last_rows!r}")
    if reference not in REFERENCES:
        raise ValueError(f"reference must be one of {', '.join(REFERENCES)}, got {reference!r}")
    if over not in OVER:
        raise ValueError(f"over must be one of {', '.join(OVER)}, got {over!r}")
    if not log_base > 1:
        raise ValueError(f"log_base must be a number above 1, got {log_base!r}")
