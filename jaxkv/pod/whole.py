"""Attention of whole texts without a cache, differentiable: what repairing and training run.

`Whole` stands where a layer's cache stands in a model, so that models need not know of it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.extend import NewTokens
from jaxkv.follow import turned
from jaxkv.positions import Rotary
from jaxkv.sharding import constrain
from jaxkv.shared import Sharing

_MASKED = -1e30
#: A text is cut into at most so many parts, each of which reads only the keys up to its end.
_PARTS = 8
#: Rows of a part, at least.
_ROWS = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Texts:
    """Rows of tokens, each of one or several documents, which do not see each other."""

    tokens: Int[Array, "batch t"]
    #: Position in the document; -1 is padding.
    positions: Int[Array, "batch t"]
    #: Number of the document within the row.
    documents: Int[Array, "batch t"]

    @classmethod
    def of(cls, tokens: Int[Array, "batch t"]) -> Self:
        """Rows of one document each, without padding."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        return cls(tokens, positions, jnp.zeros_like(tokens))

    def as_new(self, rotary: Rotary | None) -> NewTokens:
        """What layers must know of them."""
        added = jnp.sum(self.positions >= 0, 1, dtype=jnp.int32)
        turns = None if rotary is None else rotary.shared_turns(self.positions)
        return NewTokens(self.positions, added, added, turns, rotary, fresh=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Whole:
    """Attends for one layer, under a sharing or without."""

    texts: Texts
    sharing: Sharing | None = dataclasses.field(default=None, metadata={"static": True})
    #: The layer that each KV head reads distant keys of; until they are lent.
    roots: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    #: KV heads that read the keys of another layer, and these keys, rotated.
    followers: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    far_keys: Float[Array, "batch t followers dim"] | None = None
    far_values: Float[Array, "batch t followers dim"] | None = None
    #: Tokens that a query sees at most, beside the first `sinks` of a document.
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: int = dataclasses.field(default=0, metadata={"static": True})
    #: Its own keys, rotated, and values, once it has attended.
    keys: Float[Array, "batch t kv_heads dim"] | None = None
    values: Float[Array, "batch t kv_heads dim"] | None = None

    @classmethod
    def layers(
        cls, texts: Texts, count: int, sharing: Sharing | None = None, **window: Any
    ) -> list[Self]:
        """One for each layer of a model; `window` are the fields `window` and `sinks`."""
        roots = [()] * count if sharing is None else sharing.root
        return [cls(texts, sharing, tuple(root), **window) for root in roots]

    def borrow(self, earlier: Sequence[Any]) -> "Whole":
        """With the keys that the layers before this one lend to it."""
        followers = tuple(head for head, root in enumerate(self.roots) if root != len(earlier))
        found: dict[str, Any] = {}
        for name in ("keys", "values") if followers else ():
            lent = [getattr(earlier[self.roots[head]], name)[:, :, head] for head in followers]
            found[f"far_{name}"] = jnp.stack(lent, 2)
        return dataclasses.replace(self, roots=(), followers=followers, **found)

    def attend(
        self,
        queries: Float[Array, "batch t heads dim"],
        keys: Float[Array, "batch t kv_heads dim"],
        values: Float[Array, "batch t kv_heads dim"],
        new: NewTokens,
        *,
        far_map: Float[Array, "heads dim dim"] | None = None,
        window: int | None = None,
    ) -> tuple[Float[Array, "batch t heads dim"], "Whole"]:
        """The output, and itself with its keys."""
        batch, t, heads, dim = queries.shape
        kv_heads = keys.shape[2]
        grouped = queries.reshape(batch, t, kv_heads, heads // kv_heads, dim)
        q, k = turned(grouped, new), turned(keys, new)
        q, k, values, grouped = (_by_heads(x) for x in (q, k, values, grouped))
        own = [head for head in range(kv_heads) if head not in self.followers]
        sliding = (self.window, self.sinks) if self.window else (window, 0)
        outs, order = [], [*own, *self.followers]
        if own:
            at = jnp.array(own)
            outs.append(
                attend_whole(q[:, :, at], k[:, :, at], values[:, :, at], self.texts, *sliding)
            )
        if self.followers:
            at = jnp.array(self.followers)
            far = grouped[:, :, at]
            if far_map is not None:
                far = map_queries(far, far_map.reshape(kv_heads, -1, dim, dim)[at])
            assert self.far_keys is not None
            assert self.sharing is not None
            met = self.far_values if self.sharing.values else values[:, :, at]
            assert met is not None
            outs.append(
                attend_whole(
                    q[:, :, at],
                    k[:, :, at],
                    met,
                    self.texts,
                    *sliding,
                    far=(turned(far, new), self.far_keys),
                    sharing=self.sharing,
                )
            )
        out = jnp.concatenate(outs, 2)
        if order != sorted(order):
            out = out[:, :, jnp.array([order.index(head) for head in range(kv_heads)])]
        out = constrain(out.reshape(queries.shape), ("batch", "tokens", None, None))
        return out, dataclasses.replace(self, keys=k, values=values)


def _by_heads(x: Array) -> Array:
    """On a mesh whose devices hold parts of a text: every device gets whole texts of some heads
    (the all-to-all of DeepSpeed-Ulysses, arXiv 2309.14509).
    """
    return constrain(x, ("batch", None, "heads_of_texts", *(None,) * (x.ndim - 3)))


def map_queries(
    queries: Float[Array, "batch t kv_heads group dim"],
    maps: Float[Array, "kv_heads group dim dim"],
) -> Float[Array, "batch t kv_heads group dim"]:
    """Queries before rotation, multiplied by a matrix per query head."""
    return jnp.einsum("btkgd,kgde->btkge", queries, maps)


def attend_whole(
    queries: Float[Array, "batch t kv_heads group dim"],
    keys: Float[Array, "batch t kv_heads dim"],
    values: Float[Array, "batch t kv_heads dim"],
    texts: Texts,
    window: int | None = None,
    sinks: int = 0,
    *,
    far: tuple[Array, Array] | None = None,
    sharing: Sharing | None = None,
    remat: bool = True,
) -> Float[Array, "batch t kv_heads group dim"]:
    """Causal attention within documents.

    Args:
      queries, keys: rotated.
      values: of the same tokens.
      texts: where documents begin and end.
      window, sinks: a query sees at most so many tokens, and the first ones of its document.
      far: queries and keys for distant tokens, rotated, shaped as the others.
      sharing: which tokens are distant, if `far` is given.
      remat: in a gradient, attention is computed again rather than remembered.

    """
    t = queries.shape[1]
    parts = math.gcd(t, _PARTS) if t >= _PARTS * _ROWS else math.gcd(t, max(1, t // _ROWS))
    size = t // parts

    def part(rows: Any, met: Any) -> Array:
        (q, far_q, row_positions, row_documents, first), (k, far_k, v, positions, documents) = (
            rows,
            met,
        )
        ahead = (first + jnp.arange(size))[:, None] - jnp.arange(k.shape[1])[None]
        seen: Bool[Array, "batch rows keys"] = (ahead >= 0) & (
            row_documents[:, :, None] == documents[:, None]
        )
        if window is not None:
            seen &= (ahead < window) | (positions[:, None] < sinks)
        scale = q.shape[-1] ** -0.5
        logits = _logits(q, k)
        if far_q is not None:
            assert sharing is not None
            near = sharing.is_near(row_positions[:, :, None], positions[:, None])
            logits = jnp.where(near[:, None, None], logits, _logits(far_q, far_k))
        logits = jnp.where(seen[:, None, None], logits * scale, _MASKED)
        weights = jax.nn.softmax(logits, -1).astype(v.dtype)
        return jnp.einsum("bkgts,bskd->btkgd", weights, v)

    attend = jax.checkpoint(part) if remat else part
    far_queries, far_keys = (None, None) if far is None else far

    def cut(arrays: Any, at: slice) -> list[Array | None]:
        return [None if x is None else x[:, at] for x in arrays]

    outs = []
    for start in range(0, t, size):
        end = start + size
        rows = (queries, far_queries, texts.positions, texts.documents)
        met = (keys, far_keys, values, texts.positions, texts.documents)
        own = (*cut(rows, slice(start, end)), jnp.int32(start))
        outs.append(attend(own, cut(met, slice(end))))
    return jnp.concatenate(outs, 1)


def _logits(queries: Array, keys: Array) -> Float[Array, "batch kv_heads group rows keys"]:
    return jnp.einsum("btkgd,bskd->bkgts", queries, keys, preferred_element_type=jnp.float32)
