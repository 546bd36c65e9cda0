"""Layers that read each other's keys (PoD, arXiv 2412.02252), or keys and values (CLA,
arXiv 2405.12981; MiniCache, arXiv 2405.14366): the forms of their caches.

A block of consecutive layers shares the keys of its first one, its root, head by head. The KV heads
of a layer that belong to the same layers form a group. In its root, a group is an ordinary
`LayerCache`. In the layers that follow, it is a `Follower`: keys of the near tokens only, and the
values of all. A follower's slots hold the tokens that its root's slots hold, whatever policy the
root keeps them by, so that it needs no positions of its own. Where layers are merged it is a
`Merged`: lengths, and a few tokens whole.

Near tokens are the first `sinks` of a text and the `recent` ones up to the query. Their keys lie in
a ring: token p at place p while it is one of the sinks, else at `sinks + (p - sinks) % recent`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import LAYER_AXES, LayerCache, empty_layer, resize
from jaxkv.sharding import constrain_fields

#: When the far part of a step is left out: "exact" (its logits are computed, its values are not
#: read) or "predicted" (neither; the root's own far part decides).
SKIP_FORMS = ("exact", "predicted")
#: Stands in `Merged.stretch` for tokens that are stored whole.
WHOLE = -1.0


@dataclasses.dataclass(frozen=True)
class Group:
    """KV heads of a layer that share with the same layers."""

    heads: tuple[int, ...]
    #: The layer whose keys they read, and which of its groups they are there.
    root: int
    place: int
    #: Later layers read their keys.
    lends: bool


@dataclasses.dataclass(frozen=True)
class Merge:
    """How two layers are merged. Static."""

    #: How far the common direction is from the root's towards the other layer's, in [0, 1].
    toward: float
    #: The share of the tokens that the root stores which is whole.
    keep: float

    def places(self, count: int) -> int:
        """Slots for tokens that are stored whole, if the root has `count` slots."""
        return int(self.keep * count) + 1

    def budget(self, stored: Int[Array, "batch kv_heads"]) -> Int[Array, "batch kv_heads"]:
        """How many of so many tokens that a root stores are whole. (Where it drops many at once,
        more of the others may be for a while.)
        """
        return jnp.floor(self.keep * stored.astype(jnp.float32)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Who reads whose keys, and which keys everyone has. Static."""

    #: For each layer and KV head, the layer whose keys it reads for distant tokens.
    root: tuple[tuple[int, ...], ...]
    sinks: int
    recent: int
    #: A form of `SKIP_FORMS` and the share of a softmax from which the near part is enough.
    skip: tuple[str, float] | None = None
    #: Roots drop tokens. Where they do not, slots fill one after the other: slot p holds token p.
    evicts: bool = False
    #: Values are shared as well, and nothing is near: a follower stores nothing (CLA).
    values: bool = False
    #: And both are between those of the two layers (MiniCache).
    merge: Merge | None = None

    @property
    def near(self) -> int:
        """Near tokens."""
        return self.sinks + self.recent

    def groups(self, layer: int) -> tuple[Group, ...]:
        """The groups of a layer, in the order of their first heads."""
        found: dict[tuple[int, int], list[int]] = {}
        for head, block in enumerate(self._blocks(layer)):
            found.setdefault(block, []).append(head)
        return tuple(
            Group(tuple(heads), root, self._place(root, last), last > root)
            for (root, last), heads in found.items()
        )

    def _blocks(self, layer: int) -> list[tuple[int, int]]:
        """The first and the last layer of the block that each head belongs to."""
        blocks = []
        for head, root in enumerate(self.root[layer]):
            last = layer
            while last + 1 < len(self.root) and self.root[last + 1][head] == root:
                last += 1
            blocks.append((root, last))
        return blocks

    def _place(self, root: int, last: int) -> int:
        """Which of its root's groups has the block from `root` to `last`."""
        return list(dict.fromkeys(self._blocks(root))).index((root, last))

    def seats(self, positions: Array) -> Array:
        """Where in the ring tokens at these positions lie."""
        wrapped = self.sinks + (positions - self.sinks) % max(self.recent, 1)
        return jnp.where(positions < self.sinks, positions, wrapped)

    def seated(self, last: Int[Array, " batch"], seats: int) -> Int[Array, "batch seats"]:
        """The positions whose keys the first `seats` places of the ring hold when `last` is the
        newest; -1 for places that hold none.
        """
        seat, last = jnp.arange(seats), last[:, None]
        newest = last - (last - seat) % max(self.recent, 1)
        newest = jnp.where(seat < self.sinks, seat, newest)
        return jnp.where((newest >= seat) & (newest <= last), newest, -1)

    def is_near(self, query: Array, key: Array) -> Array:
        """Whether a query has a key of its own layer for a token; both are positions."""
        return (key < self.sinks) | (query - key < self.recent)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Follower:
    """A group of KV heads in a layer that reads the keys of another."""

    #: Of the near tokens, in the places of the ring.
    keys: Float[Array, "batch kv_heads near dim"]
    #: Of all tokens, in the slots of the root.
    values: Float[Array, "batch kv_heads dim slots"]
    #: As of the root.
    budget: Int[Array, "batch kv_heads"]
    count: Int[Array, "batch kv_heads"]
    #: Far parts that were left out, and all there were; None where none may be.
    skipped: Int[Array, "batch kv_heads 2"] | None

    @property
    def slots(self) -> int:
        """Slots allocated per KV head."""
        return self.values.shape[-1]

    def stored(self) -> Int[Array, "batch kv_heads"]:
        """Tokens stored per KV head."""
        return self.count


#: Logical axes of a `Follower`.
FOLLOWER_AXES: dict[str, tuple[str, ...]] = {
    "keys": ("batch", "kv_heads", "slots", "head_dim"),
    "values": ("batch", "kv_heads", "head_dim", "slots"),
    "budget": ("batch", "kv_heads"),
    "count": ("batch", "kv_heads"),
    "skipped": ("batch", "kv_heads", "counts"),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Merged:
    """A group of KV heads in the second of two merged layers."""

    #: What the root's keys and values are multiplied by, in its slots; -1 for whole tokens.
    stretch: Float[Array, "batch kv_heads 2 slots"]
    #: Tokens stored whole. Scores are the distances of their directions, traits their root slots.
    whole: LayerCache
    #: As of the root.
    budget: Int[Array, "batch kv_heads"]
    count: Int[Array, "batch kv_heads"]

    @property
    def slots(self) -> int:
        """Slots of the root."""
        return self.stretch.shape[-1]

    def stored(self) -> Int[Array, "batch kv_heads"]:
        """Tokens stored per KV head."""
        return self.count

    def resized(self, merge: Merge, count: int) -> "Merged":
        """The same with at least `count` slots in the root."""
        more = max(0, count - self.slots)
        stretch = jnp.pad(self.stretch, ((0, 0), (0, 0), (0, 0), (0, more)))
        whole = resize(self.whole, merge.places(self.slots + more))
        return dataclasses.replace(self, stretch=stretch, whole=whole)


#: Logical axes of a `Merged`, without those of its `LayerCache`.
MERGED_AXES: dict[str, tuple[str, ...]] = {
    "stretch": ("batch", "kv_heads", "keys_values", "slots"),
    "budget": ("batch", "kv_heads"),
    "count": ("batch", "kv_heads"),
}


def _empty_merged(
    merge: Merge, budget: Int[Array, "batch kv_heads"], count: int, dim: int, dtype: Any
) -> Merged:
    """A layer with nothing stored, merged with a root of `count` slots."""
    none = jnp.zeros(budget.shape, jnp.int32)
    return Merged(
        stretch=jnp.zeros((*budget.shape, 2, count), dtype),
        whole=empty_layer(none, merge.places(count), dim, dtype, scores=True, traits=True),
        budget=budget,
        count=jnp.copy(none),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lent:
    """What a root has read and kept, for the layers that follow within one `extend`."""

    #: All that its queries met: the slots, and of a block its new tokens after them. Values only
    #: where they are shared.
    keys: Float[Array, "batch kv_heads met dim"]
    values: Float[Array, "batch kv_heads dim met"] | None
    positions: Int[Array, "batch kv_heads met"]
    #: What its slots hold before and after.
    before: Int[Array, "batch kv_heads slots"]
    after: Int[Array, "batch kv_heads slots"]
    #: At a step: the slot of the new token, the slots of the tokens in the ring (beyond the last
    #: slot for those that are not stored), and the log-sum-exp of the root's own far logits.
    free: Int[Array, "batch kv_heads"] | None = None
    ring: Int[Array, "batch kv_heads near"] | None = None
    far: Float[Array, "batch kv_heads group"] | None = None
    #: Where layers are merged, the root as it is now.
    layer: LayerCache | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedLayer:
    """The cache of a layer, group by group."""

    parts: tuple["Part", ...]
    groups: tuple[Group, ...] = dataclasses.field(metadata={"static": True})
    #: For each part, what its root lends; only while the layers of a model run.
    lent: tuple[Lent | None, ...] = ()
    #: For each part that is merged, its root's keys and values as they shall be; as long.
    returned: tuple[tuple[Array, Array] | None, ...] = ()

    @property
    def slots(self) -> int:
        """Slots allocated per KV head."""
        return max(part.slots for part in self.parts)

    @property
    def budget(self) -> Int[Array, "batch kv_heads"]:
        """Tokens that each KV head may store."""
        return by_head(self.groups, [part.budget for part in self.parts])

    def stored(self) -> Int[Array, "batch kv_heads"]:
        """Tokens stored per KV head."""
        return by_head(self.groups, [part.stored() for part in self.parts])

    def borrow(self, earlier: Sequence[Any]) -> "SharedLayer":
        """With what layers before this one, which have run, lend to it."""
        lent = tuple(
            None if isinstance(part, LayerCache) else earlier[group.root].lent[group.place]
            for group, part in zip(self.groups, self.parts, strict=True)
        )
        return dataclasses.replace(self, lent=lent)

    def skipped(self) -> Int[Array, "batch kv_heads 2"] | None:
        """Far parts that were left out and all there were; None where nothing is left out."""
        none = jnp.zeros((*self.budget.shape, 2), jnp.int32)
        counts = [getattr(part, "skipped", None) for part in self.parts]
        if all(count is None for count in counts):
            return None
        each = zip(self.groups, counts, strict=True)
        return by_head(
            self.groups,
            [none[:, : len(g.heads)] if count is None else count for g, count in each],
        )


#: What a group of KV heads may be.
Part: TypeAlias = LayerCache | Follower | Merged


def by_head(groups: Sequence[Group], parts: Sequence[Array], axis: int = 1) -> Array:
    """Arrays of groups as one, in the order of KV heads along `axis`."""
    order = [head for group in groups for head in group.heads]
    joined = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
    if order == sorted(order):
        return joined
    return jnp.take(joined, np.argsort(order), axis)


def take_heads(array: Array, heads: Sequence[int], axis: int) -> Array:
    """Some KV heads, along an axis."""
    if tuple(heads) == tuple(range(array.shape[axis])):
        return array
    if tuple(heads) == tuple(range(heads[0], heads[-1] + 1)):
        return jax.lax.slice_in_dim(array, heads[0], heads[-1] + 1, axis=axis)
    return jnp.take(array, np.array(heads), axis)


def empty_follower(
    sharing: Sharing,
    budget: Int[Array, "batch kv_heads"],
    slots: int,
    near: int,
    dim: int,
    dtype: Any,
) -> Follower | Merged:
    """A follower with nothing stored, with `near` places in its ring."""
    if sharing.merge is not None:
        return _empty_merged(sharing.merge, budget, slots, dim, dtype)
    batch, kv_heads = budget.shape
    return Follower(
        keys=jnp.zeros((batch, kv_heads, near, dim), dtype),
        values=jnp.zeros((batch, kv_heads, dim, 0 if sharing.values else slots), dtype),
        budget=budget,
        count=jnp.zeros((batch, kv_heads), jnp.int32),
        skipped=jnp.zeros((batch, kv_heads, 2), jnp.int32) if sharing.skip else None,
    )


def lend(layer: Any, earlier: Sequence[Any]) -> Any:
    """A layer's cache (or what stands for it), with what the layers before it lend to it."""
    return layer if isinstance(layer, LayerCache) else layer.borrow(earlier)


def settle(layers: Sequence[Any]) -> tuple[Any, ...]:
    """The caches when all layers have run: what was lent is given back."""
    settled = list(layers)
    for index, layer in enumerate(layers):
        if not isinstance(layer, SharedLayer):
            continue
        settled[index] = dataclasses.replace(layer, lent=(), returned=())
        for group, arrays in zip(layer.groups, layer.returned, strict=False):
            if arrays is not None:
                root = settled[group.root]
                parts = list(root.parts)
                keys, values = arrays
                parts[group.place] = dataclasses.replace(
                    parts[group.place], keys=keys, values=values
                )
                settled[group.root] = dataclasses.replace(root, parts=tuple(parts))
    return tuple(settled)


def resize_shared(
    layer: SharedLayer,
    budget: Array,
    slots: Sequence[int],
    places: Callable[[int], int],
    sharing: Sharing,
) -> SharedLayer:
    """The same layer with at least these slots (one number per layer of the model), these budgets,
    and a ring of at least as many places as `places` gives for a number of slots.
    """
    parts: list[Part] = []
    for group, part in zip(layer.groups, layer.parts, strict=True):
        own = budget[:, jnp.array(group.heads)]
        if isinstance(part, LayerCache):
            parts.append(dataclasses.replace(resize(part, slots[group.root]), budget=own))
            continue
        if isinstance(part, Merged):
            assert sharing.merge is not None
            larger = part.resized(sharing.merge, slots[group.root])
            parts.append(dataclasses.replace(larger, budget=own))
            continue
        more = max(0, slots[group.root] - part.slots) if part.slots else 0
        longer = max(0, places(part.slots + more) - part.keys.shape[2])
        parts.append(
            dataclasses.replace(
                part,
                # A ring that is shorter than all near tokens has not begun anew.
                keys=jnp.pad(part.keys, ((0, 0), (0, 0), (0, longer), (0, 0))),
                values=jnp.pad(part.values, ((0, 0), (0, 0), (0, 0), (0, more))),
                budget=own,
            )
        )
    return dataclasses.replace(layer, parts=tuple(parts))


def constrain_part(part: Part) -> Part:
    """Keeps a part divided over a mesh as its axes say."""
    if isinstance(part, Merged):
        whole = constrain_fields(part.whole, LAYER_AXES)
        return dataclasses.replace(constrain_fields(part, MERGED_AXES), whole=whole)
    axes = LAYER_AXES if isinstance(part, LayerCache) else FOLLOWER_AXES
    return constrain_fields(part, axes)
