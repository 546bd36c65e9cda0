"""A layer's slots as one pool: KV heads that keep different numbers of tokens, in a fixed shape.

Arrays have fixed shapes, and how many tokens each head keeps is decided while the program runs.
So the slots of all heads lie in one row of `sum(budgets) + kv_heads` slots: head h owns the part
from `starts[h]` on, of its budget and one free slot. Budgets may move between the heads of a layer
at every block; their sum, and so the memory, stays. Between blocks the parts are fixed, and a
decode step frees and overwrites slots within them. It multiplies all query heads with all slots
and masks those of other heads: reading the pool, once, is what takes the time.

A block of new tokens first spreads the pool to rows per head (for the time of one layer), and what
stays is packed again.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxkv.cache import Candidates, LayerCache, ranks_by_age, segment_starts


def spread(layer: LayerCache) -> LayerCache:
    """A pool as rows per KV head, each as long as the pool, in the order of slots."""
    assert layer.starts is not None
    kv_heads = layer.budget.shape[1]
    slot = jnp.arange(layer.slots) + layer.starts[..., None]
    there = jnp.take_along_axis(layer.own(), jnp.minimum(slot, layer.slots - 1), 2)
    there &= slot < layer.slots
    source = jnp.minimum(slot, layer.slots - 1)

    def rows(array: Any) -> Any:
        if array is None:
            return None
        return jnp.take_along_axis(jnp.repeat(array, kv_heads, 1), source, 2)

    return dataclasses.replace(
        layer,
        keys=jnp.take_along_axis(jnp.repeat(layer.keys, kv_heads, 1), source[..., None], 2),
        values=jnp.take_along_axis(jnp.repeat(layer.values, kv_heads, 1), source[..., None, :], 3),
        positions=jnp.where(there, rows(layer.positions), -1),
        scores=rows(layer.scores),
        traits=rows(layer.traits),
        ranks=rows(layer.ranks),
        starts=None,
    )


def pack(
    tokens: Candidates,
    keep: Bool[Array, "batch kv_heads candidates"],
    budget: Int[Array, "batch kv_heads"],
    slots: int,
    *,
    ranks: bool,
) -> LayerCache:
    """A pool of `slots` slots that holds the marked tokens."""
    batch, _, count = keep.shape
    starts = segment_starts(budget, slots)
    slot = jnp.arange(slots)
    owner = jnp.sum(slot >= starts[..., None], 1) - 1
    place = slot - jnp.take_along_axis(starts, owner, 1)
    kept = jnp.take_along_axis(jnp.sum(keep, -1, dtype=jnp.int32), owner, 1)
    filled = (place < kept)[:, None]
    index = jax.lax.broadcasted_iota(jnp.int32, keep.shape, 2)
    _, order = jax.lax.sort((~keep, index), num_keys=1)
    # The slot's token among those of all heads, one after the other.
    source = jnp.take_along_axis(
        order.reshape(batch, -1), owner * count + jnp.minimum(place, count - 1), 1
    )
    source = (owner * count + source)[:, None]

    def taken(array: Any) -> Any:
        if array is None:
            return None
        return jnp.take_along_axis(array.reshape(batch, 1, -1), source, 2)

    dim = tokens.keys.shape[-1]
    keys = tokens.keys.reshape(batch, 1, -1, dim)
    values = jnp.moveaxis(tokens.values, 2, 1).reshape(batch, 1, dim, -1)
    positions = jnp.where(filled, taken(tokens.positions), -1)
    layer = LayerCache(
        keys=jnp.take_along_axis(keys, source[..., None], 2),
        values=jnp.take_along_axis(values, source[..., None, :], 3),
        positions=positions,
        scores=taken(tokens.scores),
        traits=taken(tokens.traits),
        ranks=None,
        budget=budget,
        free=starts + jnp.sum(keep, -1, dtype=jnp.int32),
        starts=starts,
    )
    if not ranks:
        return layer
    by_age = jnp.where(layer.own(), ranks_by_age(layer.by_head()), 0)
    return dataclasses.replace(layer, ranks=jnp.sum(by_age, 1, keepdims=True))
