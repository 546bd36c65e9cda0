"""Reading less: slots in pages, of which a decode step reads those that may matter (Quest).

The lowest and the highest value of each key dim in a page bound what any of its keys can score
with a query. A step compares the query with these bounds, one pair of vectors per page, and then
reads the best pages only. Nothing is dropped: this saves reading, not memory.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.attention import attend_slots, visible
from jaxkv.cache import LayerCache


def note(
    layer: LayerCache, key: Float[Array, "batch kv_heads dim"], position: Int[Array, " batch"]
) -> LayerCache:
    """Widens the bounds of the page that `key` has just been written to."""
    assert layer.bounds is not None
    batch, kv_heads = layer.free.shape
    page = layer.slots // layer.bounds.shape[2]
    b, k = jnp.arange(batch)[:, None], jnp.arange(kv_heads)[None]
    at = (b, k, layer.free // page)
    old = layer.bounds[at]
    both = jnp.stack([jnp.minimum(old[:, :, 0], key), jnp.maximum(old[:, :, 1], key)], 2)
    first = (layer.free % page == 0)[..., None, None]
    wider = jnp.where(first, key[:, :, None], both)
    wider = jnp.where((position >= 0)[:, None, None, None], wider, old)
    return dataclasses.replace(layer, bounds=layer.bounds.at[at].set(wider))


def note_all(layer: LayerCache) -> LayerCache:
    """The bounds of all pages, from the keys; 0 for empty pages."""
    assert layer.bounds is not None
    batch, kv_heads, count, _, dim = layer.bounds.shape
    keys = layer.keys.reshape(batch, kv_heads, count, -1, dim)
    there = (layer.positions >= 0).reshape(batch, kv_heads, count, -1, 1)
    bounds = jnp.stack(
        [
            jnp.min(jnp.where(there, keys, jnp.inf), 3),
            jnp.max(jnp.where(there, keys, -jnp.inf), 3),
        ],
        3,
    )
    return dataclasses.replace(layer, bounds=jnp.where(jnp.isfinite(bounds), bounds, 0))


def attend(
    queries: Float[Array, "batch kv_heads group dim"],
    layer: LayerCache,
    position: Int[Array, " batch"],
    *,
    most: int,
    pages: Int[Array, "batch kv_heads"],
) -> Float[Array, "batch heads dim"]:
    """A decode step over the best pages of each KV head; the newest token's page is among them.

    Each head reads the best of its `pages`, which are no more than the static `most`.
    """
    assert layer.bounds is not None
    batch, kv_heads, _, dim = queries.shape
    count = layer.bounds.shape[2]
    most = min(most, count)
    by_page = layer.positions.reshape(batch, kv_heads, count, -1)
    query = queries[:, :, :, None]
    low, high = layer.bounds[:, :, None, :, 0], layer.bounds[:, :, None, :, 1]
    bound = jnp.sum(jnp.maximum(query * low, query * high), -1, dtype=jnp.float32)
    worth = jnp.where(jnp.any(by_page >= 0, -1), jnp.max(bound, 2), -jnp.inf)
    current = jnp.any(by_page == position[:, None, None, None], -1)
    _, best = lax.top_k(jnp.where(current, jnp.inf, worth), most)

    keys = layer.keys.reshape(batch, kv_heads, count, -1, dim)
    keys = jnp.take_along_axis(keys, best[..., None, None], 2)
    values = layer.values.reshape(batch, kv_heads, dim, count, -1)
    values = jnp.take_along_axis(values, best[:, :, None, :, None], 3)
    positions = jnp.take_along_axis(by_page, best[..., None], 2)
    # A sequence with a smaller budget than the largest reads fewer.
    allowed = jnp.arange(most) < pages[..., None]
    positions = jnp.where(allowed[..., None], positions, -1).reshape(batch, kv_heads, -1)
    out, _ = attend_slots(
        queries.reshape(batch, -1, dim),
        keys.reshape(batch, kv_heads, -1, dim),
        values.reshape(batch, kv_heads, dim, -1),
        visible(position[:, None, None], positions, None),
        query_positions=position,
        key_positions=positions,
        layer=jnp.int32(0),
    )
    return out
