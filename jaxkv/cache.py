"""The cache: slots of keys and values that never move, as immutable pytrees.

A budget of n is n stored tokens and one free slot for the newcomer. A decode step writes the new
token into the free slot, attends, and then frees the slot of the token that is worth least: the
in-place reuse of H2O. A block of new tokens is merged at once: stored tokens that stay keep their
slots, and the block's survivors fill the others.

Layouts are chosen for reading: keys `[batch, kv_heads, slots, dim]` and values
`[batch, kv_heads, dim, slots]`, so that both products of a decode step walk along memory with the
cache as the left operand. Nothing outside this file and `attention.py` depends on that.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_BIG = jnp.iinfo(jnp.int32).max
#: The budget of policies that never evict.
UNBOUNDED = 2**30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The slots of one layer. Every KV head of every sequence keeps its own tokens."""

    keys: Float[Array, "batch kv_heads slots dim"]
    values: Float[Array, "batch kv_heads dim slots"]
    #: The token that a slot holds, by its position in the text; -1 is an empty slot.
    positions: Int[Array, "batch kv_heads slots"]
    #: Attention received so far, float32 whatever the dtype of keys (sums stall in half
    #: precision); None when the policy has no use for it.
    scores: Float[Array, "batch kv_heads slots"] | None
    #: How many stored tokens are older; None unless positions are "rolling".
    ranks: Int[Array, "batch kv_heads slots"] | None
    #: Tokens that may be stored.
    budget: Int[Array, "batch kv_heads"]
    #: The empty slot that the next token is written to.
    free: Int[Array, "batch kv_heads"]

    @property
    def slots(self) -> int:
        """Slots allocated per KV head, the free one and padding included."""
        return self.positions.shape[-1]

    def stored(self) -> Int[Array, "batch kv_heads"]:
        """Tokens stored per KV head."""
        return jnp.sum(self.positions >= 0, -1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The state of generation between two calls: one `LayerCache` per layer, and how many tokens
    each sequence has seen (not how many it kept).
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, " batch"]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: what the live cache takes."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))


#: Logical axes of every leaf of a `LayerCache`, to be mapped to mesh axes by one table.
LAYER_AXES: dict[str, tuple[str, ...]] = {
    "keys": ("batch", "kv_heads", "slots", "head_dim"),
    "values": ("batch", "kv_heads", "head_dim", "slots"),
    "positions": ("batch", "kv_heads", "slots"),
    "scores": ("batch", "kv_heads", "slots"),
    "ranks": ("batch", "kv_heads", "slots"),
    "budget": ("batch", "kv_heads"),
    "free": ("batch", "kv_heads"),
}


#: And of the `Cache` around them.
CACHE_AXES: dict[str, tuple[str, ...]] = {"length": ("batch",)}


def empty_layer(
    budget: Int[Array, "batch kv_heads"],
    slots: int,
    head_dim: int,
    dtype: Any,
    *,
    scores: bool,
    ranks: bool,
) -> LayerCache:
    """A layer with nothing stored. `slots` must exceed every budget that can be reached."""
    batch, kv_heads = budget.shape
    shape = (batch, kv_heads, slots)
    return LayerCache(
        keys=jnp.zeros((*shape, head_dim), dtype),
        values=jnp.zeros((batch, kv_heads, head_dim, slots), dtype),
        positions=jnp.full(shape, -1, jnp.int32),
        scores=jnp.zeros(shape, jnp.float32) if scores else None,
        ranks=jnp.zeros(shape, jnp.int32) if ranks else None,
        budget=budget,
        free=jnp.zeros((batch, kv_heads), jnp.int32),
    )


def write(
    layer: LayerCache,
    key: Float[Array, "batch kv_heads dim"],
    value: Float[Array, "batch kv_heads dim"],
    position: Int[Array, " batch"],
) -> LayerCache:
    """Puts one new token per sequence into the free slot; position -1 leaves that slot empty."""
    batch, kv_heads = layer.free.shape
    b = jnp.arange(batch)[:, None]
    k = jnp.arange(kv_heads)[None, :]
    at = (b, k, layer.free)
    write_options: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}
    ranks = layer.ranks
    if ranks is not None:
        ranks = ranks.at[at].set(layer.stored(), **write_options)
    scores = layer.scores
    if scores is not None:
        scores = scores.at[at].set(0.0, **write_options)
    return dataclasses.replace(
        layer,
        keys=layer.keys.at[at].set(key, **write_options),
        values=layer.values.at[b, k, :, layer.free].set(value, **write_options),
        positions=layer.positions.at[at].set(position[:, None], **write_options),
        scores=scores,
        ranks=ranks,
    )


def free_next(layer: LayerCache, priority: Float[Array, "batch kv_heads slots"]) -> LayerCache:
    """Frees the slot for the next token: an empty one while the budget lasts, else that of the
    token with the lowest priority (of equals, the youngest).
    """
    # Slots beyond a sequence's own budget must stay empty: they are padding.
    usable = jnp.arange(layer.slots) <= layer.budget[..., None]
    worth = jnp.where(layer.positions < 0, -jnp.inf, priority)
    worth = jnp.where(usable, worth, jnp.inf)
    # Barriers keep XLA on CPU from computing all this anew inside each of the reductions.
    worth = jax.lax.optimization_barrier(worth)
    lowest = worth == jax.lax.optimization_barrier(jnp.min(worth, -1, keepdims=True))
    free = jnp.argmax(jnp.where(lowest & usable, layer.positions, -2), -1).astype(jnp.int32)
    ranks = layer.ranks
    chosen = jnp.arange(layer.slots) == free[..., None]
    if ranks is not None:
        gone = jnp.max(jnp.where(chosen & (layer.positions >= 0), ranks, -1), -1, keepdims=True)
        ranks = jnp.where((gone >= 0) & (ranks > gone), ranks - 1, ranks)
    positions = jnp.where(chosen, -1, layer.positions)
    return dataclasses.replace(layer, positions=positions, ranks=ranks, free=free)


def advance(layer: LayerCache, added: Int[Array, " batch"]) -> LayerCache:
    """`free_next` for policies that never evict: slots fill one after the other."""
    return dataclasses.replace(layer, free=layer.free + added[:, None])


def keep_best(
    priority: Float[Array, "batch kv_heads candidates"],
    positions: Int[Array, "batch kv_heads candidates"],
    budget: Int[Array, "batch kv_heads"],
) -> Bool[Array, "batch kv_heads candidates"]:
    """Marks the `budget` candidates of highest priority; of equals, the oldest."""
    empty = positions < 0
    worst_first = jnp.where(empty, jnp.inf, -priority)
    index = jax.lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 1)
    _, _, order = jax.lax.sort((worst_first, jnp.where(empty, _BIG, positions), index), num_keys=2)
    _, place = jax.lax.sort((order, index), num_keys=1)
    return (place < budget[..., None]) & ~empty


def merge(
    layer: LayerCache,
    keys: Float[Array, "batch kv_heads new dim"],
    values: Float[Array, "batch kv_heads dim new"],
    positions: Int[Array, "batch kv_heads new"],
    scores: Float[Array, "batch kv_heads new"] | None,
    keep_old: Bool[Array, "batch kv_heads slots"],
    keep_new: Bool[Array, "batch kv_heads new"],
) -> LayerCache:
    """Stores the marked tokens of a block beside the marked stored ones.

    Stored tokens that stay keep their slots; the block's fill the other slots in order of age.
    At least one slot must remain empty.
    """
    vacant = ~keep_old
    # The j-th vacant slot takes the j-th kept token of the block.
    turn = jnp.cumsum(vacant, -1, dtype=jnp.int32) - 1
    fill = vacant & (turn < jnp.sum(keep_new, -1, keepdims=True))
    index = jax.lax.broadcasted_iota(jnp.int32, keep_new.shape, 2)
    _, order = jax.lax.sort((~keep_new, index), num_keys=1)
    source = jnp.take_along_axis(order, jnp.clip(turn, 0, order.shape[-1] - 1), -1)

    taken = jnp.take_along_axis(positions, source, -1)
    positions = jnp.where(fill, taken, jnp.where(keep_old, layer.positions, -1))
    if layer.scores is not None and scores is not None:
        scores = jnp.where(fill, jnp.take_along_axis(scores, source, -1), layer.scores)
    taken_keys = jnp.take_along_axis(keys, source[..., None], 2)
    taken_values = jnp.take_along_axis(values, source[..., None, :], 3)
    return dataclasses.replace(
        layer,
        keys=jnp.where(fill[..., None], taken_keys, layer.keys),
        values=jnp.where(fill[..., None, :], taken_values, layer.values),
        positions=positions,
        scores=scores,
        ranks=None if layer.ranks is None else ranks_by_age(positions),
        free=jnp.argmax(positions < 0, -1).astype(jnp.int32),
    )


def resize(cache: Cache, slots: Sequence[int]) -> Cache:
    """The same cache with at least `slots[i]` slots in layer i. It never shrinks."""

    def grow(layer: LayerCache, wanted: int) -> LayerCache:
        more = max(0, wanted - layer.slots)
        if not more:
            return layer
        last = ((0, 0), (0, 0), (0, more))
        return dataclasses.replace(
            layer,
            keys=jnp.pad(layer.keys, (*last, (0, 0))),
            values=jnp.pad(layer.values, ((0, 0), *last)),
            positions=jnp.pad(layer.positions, last, constant_values=-1),
            scores=None if layer.scores is None else jnp.pad(layer.scores, last),
            ranks=None if layer.ranks is None else jnp.pad(layer.ranks, last),
        )

    layers = tuple(grow(layer, n) for layer, n in zip(cache.layers, slots, strict=True))
    return dataclasses.replace(cache, layers=layers)


def ranks_by_age(positions: Int[Array, "*rows slots"]) -> Int[Array, "*rows slots"]:
    """For each slot, how many stored tokens are older; empty slots come last."""
    index = jax.lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 1)
    _, order = jax.lax.sort((jnp.where(positions < 0, _BIG, positions), index), num_keys=1)
    _, ranks = jax.lax.sort((order, index), num_keys=1)
    return ranks
