"""The cache: slots of keys and values that never move, as immutable pytrees.

A budget of n is n stored tokens and one free slot for the newcomer. A decode step writes the new
token into the free slot, attends, and then frees the slot of the token that is worth least: the
in-place reuse of H2O. A block of new tokens is merged at once: stored tokens that stay keep their
slots, and the block's survivors fill the others.

Where KV heads keep different numbers of tokens, the slots of a layer are one pool, see `pool`.

Layouts are chosen for reading: keys `[batch, kv_heads, slots, dim]` and values
`[batch, kv_heads, dim, slots]`, so that both products of a decode step walk along memory with the
cache as the left operand.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.pallas_kernels.gather import gather
from jaxkv.pallas_kernels.victim import victim

_BIG = jnp.iinfo(jnp.int32).max
#: The budget of policies that never evict.
UNBOUNDED = 2**30
_WRITE: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The slots of one layer. Every KV head of every sequence keeps its own tokens.

    `rows` are the KV heads, or 1 where the slots of all heads are one pool.
    """

    keys: Float[Array, "batch rows slots dim"]
    values: Float[Array, "batch rows dim slots"]
    #: The token that a slot holds, by its position in the text; -1 is an empty slot.
    positions: Int[Array, "batch rows slots"]
    #: What the policy remembers of each token, by default the attention that it has received;
    #: float32 whatever the dtype of keys (sums stall in half precision); None without need.
    scores: Float[Array, "batch rows slots"] | None
    #: How many stored tokens are older; None unless positions are "rolling".
    ranks: Int[Array, "batch rows slots"] | None
    #: Tokens that may be stored.
    budget: Int[Array, "batch kv_heads"]
    #: The empty slot that the next token is written to.
    free: Int[Array, "batch kv_heads"]
    #: A number that the policy gave each token when it came; None without need.
    traits: Float[Array, "batch rows slots"] | None = None
    #: In a pool, the first slot of each head; None otherwise.
    starts: Int[Array, "batch kv_heads"] | None = None
    #: Lowest and highest key of each page of slots; None unless the policy reads pages.
    bounds: Float[Array, "batch rows pages 2 dim"] | None = None
    #: The last queries, rotated, that of position p at p % recent; None without need.
    queries: Float[Array, "batch kv_heads group recent dim"] | None = None
    #: What each head of this layer is worth to the policy; None without need.
    weight: Float[Array, "batch kv_heads"] | None = None

    @property
    def slots(self) -> int:
        """Slots allocated per KV head (in a pool: for all of them), padding included."""
        return self.positions.shape[-1]

    def own(self) -> Bool[Array, "batch kv_heads slots"]:
        """Which slots belong to which KV head."""
        if self.starts is None:
            return jnp.ones((*self.budget.shape, self.slots), bool)
        slot = jnp.arange(self.slots)
        first = self.starts[..., None]
        end = jnp.concatenate([first[:, 1:], jnp.full_like(first[:, :1], self.slots)], 1)
        return (slot >= first) & (slot < end)

    def by_head(self) -> Int[Array, "batch kv_heads slots"]:
        """Positions as each KV head sees them: -1 in the slots of others."""
        return self.positions if self.starts is None else jnp.where(self.own(), self.positions, -1)

    def stored(self) -> Int[Array, "batch kv_heads"]:
        """Tokens stored per KV head."""
        return jnp.sum(self.by_head() >= 0, -1, dtype=jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The state of generation between two calls: one `LayerCache` per layer, and how many tokens
    each sequence has seen (not how many it kept).
    """

    #: `LayerCache`, or `jaxkv.shared.SharedLayer` where layers read each other's keys.
    layers: tuple[Any, ...]
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
    "traits": ("batch", "kv_heads", "slots"),
    "starts": ("batch", "kv_heads"),
    "bounds": ("batch", "kv_heads", "pages", "bounds", "head_dim"),
    "queries": ("batch", "kv_heads", "group", "recent", "head_dim"),
    "weight": ("batch", "kv_heads"),
}


#: And of the `Cache` around them.
CACHE_AXES: dict[str, tuple[str, ...]] = {"length": ("batch",)}


def empty_layer(
    budget: Int[Array, "batch kv_heads"],
    slots: int,
    head_dim: int,
    dtype: Any,
    *,
    scores: bool = False,
    traits: bool = False,
    ranks: bool = False,
    weight: bool = False,
    pooled: bool = False,
    page: int | None = None,
    queries: tuple[int, int] | None = None,
) -> LayerCache:
    """A layer with nothing stored. `slots` must exceed every budget that can be reached; in a pool
    it must exceed their sum by one for each head. `queries` are the query heads of a KV head and
    how many queries are remembered.
    """
    batch, kv_heads = budget.shape
    rows = 1 if pooled else kv_heads
    shape = (batch, rows, slots)
    starts = segment_starts(budget, slots) if pooled else None
    bounds = None
    if page is not None:
        bounds = jnp.zeros((batch, rows, -(-slots // page), 2, head_dim), dtype)
    return LayerCache(
        keys=jnp.zeros((*shape, head_dim), dtype),
        values=jnp.zeros((batch, rows, head_dim, slots), dtype),
        positions=jnp.full(shape, -1, jnp.int32),
        scores=jnp.zeros(shape, jnp.float32) if scores else None,
        traits=jnp.zeros(shape, jnp.float32) if traits else None,
        ranks=jnp.zeros(shape, jnp.int32) if ranks else None,
        budget=budget,
        # A copy: the loops give arrays away, each once.
        free=jnp.zeros((batch, kv_heads), jnp.int32) if starts is None else jnp.copy(starts),
        starts=starts,
        bounds=bounds,
        queries=jnp.zeros((batch, kv_heads, *queries, head_dim), dtype) if queries else None,
        weight=jnp.zeros((batch, kv_heads), jnp.float32) if weight else None,
    )


def segment_starts(
    budget: Int[Array, "batch kv_heads"], slots: int
) -> Int[Array, "batch kv_heads"]:
    """Where the heads' parts of a pool begin: each has its budget and a like share of the rest."""
    size = budget + (slots - jnp.sum(budget, -1, keepdims=True)) // budget.shape[1]
    return (jnp.cumsum(size, -1) - size).astype(jnp.int32)


def note(
    layer: LayerCache,
    position: Int[Array, " batch"],
    trait: Float[Array, "batch kv_heads"] | None = None,
) -> LayerCache:
    """Gives the free slots to one new token per sequence: all but its keys and values. Position -1
    leaves them empty.
    """

    def written(array: Any, new: Any) -> Any:
        return _at_heads(array, layer, layer.free).set(new, **_WRITE)

    return dataclasses.replace(
        layer,
        positions=written(layer.positions, position[:, None]),
        scores=None if layer.scores is None else written(layer.scores, 0.0),
        traits=None if layer.traits is None else written(layer.traits, trait),
        ranks=None if layer.ranks is None else written(layer.ranks, layer.stored()),
    )


def free_next(layer: LayerCache, priority: Float[Array, "batch kv_heads slots"]) -> LayerCache:
    """Frees a slot of each head for the next token: an empty one while the budget lasts, else that
    of the token with the lowest priority (of equals, the youngest).
    """
    # Slots beyond a head's own budget must stay empty: they are padding.
    first = jnp.zeros_like(layer.free) if layer.starts is None else layer.starts
    (free,) = victim(layer.positions, priority, first, first + layer.budget)
    ranks = layer.ranks
    if ranks is not None:
        chosen = jnp.arange(layer.slots) == free[..., None]
        gone = jnp.max(jnp.where(chosen & (layer.positions >= 0), ranks, -1), -1, keepdims=True)
        older = (gone >= 0) & (ranks > gone) & layer.own()
        ranks = ranks - _merge_rows(layer, older).astype(jnp.int32)
    positions = _at_heads(layer.positions, layer, free).set(-1, **_WRITE)
    return dataclasses.replace(layer, positions=positions, ranks=ranks, free=free)


def _at_heads(array: Array, layer: LayerCache, slot: Int[Array, "batch kv_heads"]) -> Any:
    """`array.at` one slot of each head."""
    batch, kv_heads = slot.shape
    row = jnp.arange(kv_heads)[None, :] if layer.starts is None else jnp.zeros((1, 1), jnp.int32)
    return array.at[jnp.arange(batch)[:, None], row, slot]


def _merge_rows(layer: LayerCache, mask: Bool[Array, "batch kv_heads slots"]) -> Array:
    """A mask per head as one of `layer.positions`' shape."""
    return mask if layer.starts is None else jnp.any(mask, 1, keepdims=True)


def advance(layer: LayerCache, added: Int[Array, " batch"]) -> LayerCache:
    """`next_empty` where slots fill one after the other."""
    return dataclasses.replace(layer, free=layer.free + added[:, None])


def next_empty(layer: LayerCache) -> LayerCache:
    """Chooses the first empty slot of each head for the next token."""
    free = jnp.argmax((layer.positions < 0) & layer.own(), -1).astype(jnp.int32)
    return dataclasses.replace(layer, free=free)


def drop(layer: LayerCache, keep: Bool[Array, "batch kv_heads slots"]) -> LayerCache:
    """Empties the slots that are not marked, where they are."""
    mine = _merge_rows(layer, keep & layer.own())
    positions = jnp.where(mine, layer.positions, -1)
    layer = dataclasses.replace(layer, positions=positions)
    if layer.ranks is None:
        return layer
    by_head = jnp.where(layer.own(), positions, -1)
    ranks = jnp.where(layer.own(), ranks_by_age(by_head), 0)
    if layer.starts is not None:
        ranks = jnp.sum(ranks, 1, keepdims=True)
    return dataclasses.replace(layer, ranks=ranks)


def places(
    priority: Float[Array, "*rows candidates"], positions: Int[Array, "*rows candidates"]
) -> Int[Array, "*rows candidates"]:
    """The place of each candidate, best first; of equals the oldest, empty ones last."""
    empty = positions < 0
    worst_first = jnp.where(empty, jnp.inf, -priority)
    index = jax.lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 1)
    _, _, order = jax.lax.sort((worst_first, jnp.where(empty, _BIG, positions), index), num_keys=2)
    _, place = jax.lax.sort((order, index), num_keys=1)
    return place


def keep_best(
    priority: Float[Array, "batch kv_heads candidates"],
    positions: Int[Array, "batch kv_heads candidates"],
    budget: Int[Array, "batch kv_heads"],
) -> Bool[Array, "batch kv_heads candidates"]:
    """Marks the `budget` candidates of highest priority; of equals, the oldest."""
    return (places(priority, positions) < budget[..., None]) & (positions >= 0)


class Candidates(NamedTuple):
    """Tokens that compete for slots, as rows per KV head: the stored ones, then the new."""

    keys: Float[Array, "batch kv_heads candidates dim"]
    values: Float[Array, "batch kv_heads dim candidates"]
    positions: Int[Array, "batch kv_heads candidates"]
    scores: Float[Array, "batch kv_heads candidates"] | None
    traits: Float[Array, "batch kv_heads candidates"] | None

    def last(self, count: int) -> "Candidates":
        """The last `count` candidates."""
        start = self.positions.shape[-1] - count
        scores, traits = (None if x is None else x[..., start:] for x in self[3:])
        positions = self.positions[..., start:]
        keys, values = self.keys[:, :, start:], self.values[..., start:]
        return Candidates(keys, values, positions, scores, traits)

    def take(self, source: Int[Array, "batch kv_heads taken"]) -> "Candidates":
        """The candidates at some indices."""
        scores, traits = (
            None if x is None else jnp.take_along_axis(x, source, -1) for x in self[3:]
        )
        keys, values = gather(self.keys, self.values, source)
        positions = jnp.take_along_axis(self.positions, source, -1)
        return Candidates(keys, values, positions, scores, traits)


def candidates(layer: LayerCache) -> Candidates:
    """The stored tokens of a layer that is not a pool."""
    return Candidates(layer.keys, layer.values, layer.positions, layer.scores, layer.traits)


def join(stored: Candidates, new: Candidates) -> Candidates:
    """Both, one after the other."""

    def both(a: Array | None, b: Array | None) -> Array | None:
        return None if a is None or b is None else jnp.concatenate([a, b], 2)

    return Candidates(
        jnp.concatenate([stored.keys, new.keys], 2),
        jnp.concatenate([stored.values, new.values], 3),
        jnp.concatenate([stored.positions, new.positions], 2),
        both(stored.scores, new.scores),
        both(stored.traits, new.traits),
    )


def merge(
    layer: LayerCache,
    new: Candidates,
    keep_old: Bool[Array, "batch kv_heads slots"],
    keep_new: Bool[Array, "batch kv_heads new"],
) -> LayerCache:
    """Stores the marked tokens of a block beside the marked stored ones (not for pools).

    Stored tokens that stay keep their slots; the block's fill the other slots in order of age.
    At least one slot must remain empty.
    """
    vacant = ~keep_old
    # The j-th vacant slot takes the j-th kept token of the block.
    turn = jnp.cumsum(vacant, -1, dtype=jnp.int32) - 1
    fill = vacant & (turn < jnp.sum(keep_new, -1, keepdims=True))
    index = jax.lax.broadcasted_iota(jnp.int32, keep_new.shape, 2)
    _, order = jax.lax.sort((~keep_new, index), num_keys=1)
    taken = new.take(jnp.take_along_axis(order, jnp.clip(turn, 0, order.shape[-1] - 1), -1))

    def filled(old: Array | None, incoming: Array | None) -> Array | None:
        return old if old is None or incoming is None else jnp.where(fill, incoming, old)

    positions = jnp.where(fill, taken.positions, jnp.where(keep_old, layer.positions, -1))
    return dataclasses.replace(
        layer,
        keys=jnp.where(fill[..., None], taken.keys, layer.keys),
        values=jnp.where(fill[..., None, :], taken.values, layer.values),
        positions=positions,
        scores=filled(layer.scores, taken.scores),
        traits=filled(layer.traits, taken.traits),
        ranks=None if layer.ranks is None else ranks_by_age(positions),
        free=jnp.argmax(positions < 0, -1).astype(jnp.int32),
    )


def resize(layer: LayerCache, slots: int) -> LayerCache:
    """The same layer with at least `slots` slots (not for pools). It never shrinks."""
    more = max(0, slots - layer.slots)
    if not more:
        return layer
    last = ((0, 0), (0, 0), (0, more))

    def padded(array: Array | None) -> Array | None:
        return None if array is None else jnp.pad(array, last)

    bounds = layer.bounds
    if bounds is not None:
        page = -(-layer.slots // bounds.shape[2])
        pages = max(0, -(-slots // page) - bounds.shape[2])
        bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, pages), (0, 0), (0, 0)))
    return dataclasses.replace(
        layer,
        keys=jnp.pad(layer.keys, (*last, (0, 0))),
        values=jnp.pad(layer.values, ((0, 0), *last)),
        positions=jnp.pad(layer.positions, last, constant_values=-1),
        scores=padded(layer.scores),
        traits=padded(layer.traits),
        ranks=padded(layer.ranks),
        bounds=bounds,
    )


def ranks_by_age(positions: Int[Array, "*rows slots"]) -> Int[Array, "*rows slots"]:
    """For each slot, how many stored tokens are older; empty slots come last."""
    index = jax.lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 1)
    _, order = jax.lax.sort((jnp.where(positions < 0, _BIG, positions), index), num_keys=1)
    _, ranks = jax.lax.sort((order, index), num_keys=1)
    return ranks
