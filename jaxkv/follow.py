"""`extend_layer`: `extend` for layers whose KV heads may follow those of an earlier layer.

Groups of heads that are their own root are extended as any other, by the policy; what they met and
kept is lent to the layers that follow. A group that follows attends to near tokens with its own
keys and to distant ones with its root's, and stores what its root stores.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import cache as slots
from jaxkv.attention import Far, attend_slots, visible
from jaxkv.cache import LayerCache
from jaxkv.extend import NewTokens, extend
from jaxkv.merged import follow_merged
from jaxkv.pallas_kernels.decode_shared import decode_shared, far_lse
from jaxkv.pallas_kernels.prompt import prompt
from jaxkv.policies.base import Policy
from jaxkv.positions import turn
from jaxkv.shared import Follower, Lent, Merged, SharedLayer, by_head, constrain_part


def extend_layer(
    queries: Float[Array, "batch t heads dim"],
    keys: Float[Array, "batch t kv_heads dim"],
    values: Float[Array, "batch t kv_heads dim"],
    layer: Any,
    new: NewTokens,
    policy: Policy,
    *,
    index: Int[Array, ""],
    window: int | None = None,
    output: Float[Array, "embed heads_dim"] | None = None,
    far_map: Float[Array, "heads dim dim"] | None = None,
) -> tuple[Float[Array, "batch t heads dim"], Any]:
    """As `extend`, group by group where `policy.sharing` says so; or what stands in the place of a
    cache attends by itself (`jaxkv.pod.whole`).

    `far_map` is what queries are multiplied by, before rotation, where they meet the keys of
    another layer.
    """
    options: dict[str, Any] = {"index": index, "window": window}
    if not isinstance(layer, LayerCache | SharedLayer):
        return layer.attend(queries, keys, values, new, far_map=far_map, window=window)
    if isinstance(layer, LayerCache):
        return extend(queries, keys, values, layer, new, policy, output=output, **options)
    sharing, policy = policy.sharing, policy.keeper
    assert sharing is not None
    batch, t, heads, dim = queries.shape
    kv_heads = keys.shape[2]
    grouped = queries.reshape(batch, t, kv_heads, heads // kv_heads, dim)
    outs, parts, lent, returned = [], [], [], []
    for group, part, given in zip(layer.groups, layer.parts, layer.lent, strict=True):
        own = jnp.array(group.heads)
        whole = group.heads == tuple(range(kv_heads))
        q, k, v = (x if whole else x[:, :, own] for x in (grouped, keys, values))
        back = None
        if isinstance(part, LayerCache):
            weight = output if whole or output is None else _columns(output, own, kv_heads)
            flat = q.reshape(batch, t, -1, dim)
            out, after = extend(flat, k, v, part, new, policy, output=weight, **options)
            out = out.reshape(q.shape)
            lent.append(
                _lend(q, k, v, part, after, new, policy, sharing, window) if group.lends else None
            )
        else:
            assert given is not None
            q_far = q
            if far_map is not None:
                maps = far_map.reshape(kv_heads, -1, dim, dim)[own]
                q_far = jnp.einsum("btkgd,kgde->btkge", q, maps)
            if isinstance(part, Merged):
                q, k = turned(q, new), turned(k, new)
                out, after, back = follow_merged(
                    q, k, v, part, given, new, sharing.merge, window, index
                )
            elif sharing.values:
                out, after = _follow_all(q_far, part, given, new, index, window)
            else:
                out, after = _follow(q, q_far, k, v, part, given, new, sharing, index, window)
            lent.append(given if group.lends else None)
        outs.append(out)
        parts.append(constrain_part(after))
        returned.append(back)
    out = by_head(layer.groups, outs, 2).reshape(queries.shape)
    return out, SharedLayer(tuple(parts), layer.groups, tuple(lent), tuple(returned))


def _columns(output: Array, own: Array, kv_heads: int) -> Array:
    """The columns of an output projection that belong to some KV heads."""
    columns = output.reshape(output.shape[0], kv_heads, -1)
    return columns[:, own].reshape(output.shape[0], -1)


def turned(x: Array, new: NewTokens) -> Array:
    """Queries or keys `[batch, t, ..., dim]`, rotated to the positions of the new tokens."""
    if new.turns is None:
        return x
    inner = (1,) * (x.ndim - 3)
    cos, sin = (a.reshape(*a.shape[:2], *inner, a.shape[-1]) for a in new.turns)
    return turn(x, (cos, sin))


def _lend(q, k, v, before, after, new, policy, sharing, window):
    """What the layers that follow need to know of a root that has been extended."""
    batch, t, _, _, dim = q.shape
    if t > 1 or new.fresh:
        keys, values = jnp.moveaxis(turned(k, new), 1, 2), jnp.moveaxis(v, 1, 3)
        positions = jnp.broadcast_to(new.positions[:, None], keys.shape[:3])
        if not new.fresh:
            keys = jnp.concatenate([before.keys, keys], 2)
            values = jnp.concatenate([before.values, values], 3)
            positions = jnp.concatenate([before.positions, positions], 2)
        lent = values if sharing.values else None
        layer = after if sharing.merge else None
        return Lent(keys, lent, positions, before.positions, after.positions, layer=layer)
    position = new.positions[:, 0]
    met = slots.note(before, position, jnp.zeros_like(before.free, jnp.float32)).positions
    far = None
    if sharing.skip is not None and sharing.skip[0] == "predicted":
        rotated = turned(q, new).reshape(batch, -1, dim)
        (far,) = far_lse(rotated, after.keys, met, position, sharing=sharing, window=window)
    return Lent(
        keys=after.keys,
        values=after.values if sharing.values else None,
        positions=met,
        before=before.positions,
        after=after.positions,
        free=before.free,
        ring=_slots_of_ring(met, new, policy, sharing),
        far=far,
        layer=after if sharing.merge else None,
    )


def _slots_of_ring(met, new, policy, sharing):
    """The slots of the tokens in the ring; beyond the last slot for those that are not stored."""
    batch, kv_heads, count = met.shape
    last = new.length - 1
    if not policy.evicts:
        # Slots fill one after the other: a token's slot is its position.
        held = sharing.seated(last, min(sharing.near, count))
        ring = jnp.where(held < 0, count, held)[:, None]
        return jnp.broadcast_to(ring, (batch, kv_heads, ring.shape[-1]))
    near = (met >= 0) & sharing.is_near(last[:, None, None], met)
    seat = jnp.where(near, sharing.seats(met), sharing.near)
    b, k = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)[None, :, None]
    ring = jnp.full((batch, kv_heads, sharing.near), count)
    return ring.at[b, k, seat].set(jnp.arange(count), mode="drop")


def _follow(q, q_far, k, v, part, lent, new, sharing, index, window):
    batch, t, kv_heads, group, dim = q.shape
    q, q_far, k = (turned(x, new) for x in (q, q_far, k))
    if t == 1 and not new.fresh:
        ring = lent.ring[..., : part.keys.shape[2]]
        out, keys, values, counts = decode_shared(
            q.reshape(batch, kv_heads * group, dim),
            q_far.reshape(batch, kv_heads * group, dim),
            k[:, 0],
            v[:, 0],
            part.keys,
            part.values,
            lent.keys,
            lent.positions,
            ring,
            lent.free,
            new.positions[:, 0],
            lent.far,
            sharing=sharing,
            window=window,
        )
        skipped = None if counts is None else part.skipped + counts
        out = out.reshape(q.shape)
    else:
        out, keys, values = _follow_block(q, q_far, k, v, part, lent, new, sharing, index, window)
        skipped = part.skipped
    count = jnp.sum(lent.after >= 0, -1, dtype=jnp.int32)
    return out, Follower(keys, values, part.budget, count, skipped)


def _follow_all(q, part, lent, new, index, window):
    """Attends to all that the root attended to; stores nothing."""
    batch, t, kv_heads, group, dim = q.shape
    q = turned(q, new)
    options: dict[str, Any] = {"statistics": (), "layer": index}
    if t == 1 and not new.fresh:
        position = new.positions[:, 0]
        out, _ = attend_slots(
            q.reshape(batch, kv_heads * group, dim),
            lent.keys,
            lent.values,
            visible(position[:, None, None], lent.positions, window),
            query_positions=position,
            key_positions=lent.positions,
            **options,
        )
        out = out.reshape(q.shape)
    else:
        out, _ = prompt(
            jnp.moveaxis(q, 1, 3),
            new.positions,
            lent.keys,
            lent.values,
            lent.positions,
            window=window,
            **options,
        )
        out = jnp.moveaxis(out, 3, 1)
    count = jnp.sum(lent.after >= 0, -1, dtype=jnp.int32)
    return out, dataclasses.replace(part, count=count)


def _follow_block(q, q_far, k, v, part, lent, new, sharing, index, window):
    t = k.shape[1]
    q, q_far = (jnp.moveaxis(x, 1, 3) for x in (q, q_far))
    k, v = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 3)
    near, met = k, v
    if not new.fresh:
        # Stored keys that are not in the ring are distant, and whatever stands for them unused.
        seat = jnp.clip(sharing.seats(lent.before), 0, part.keys.shape[2] - 1)
        stored = jnp.take_along_axis(part.keys, seat[..., None], 2)
        near, met = jnp.concatenate([stored, k], 2), jnp.concatenate([part.values, v], 3)
    limit = jnp.full((*k.shape[:2], 1), sharing.recent, jnp.int32)
    out, _ = prompt(
        q,
        new.positions,
        near,
        met,
        lent.positions,
        window=window,
        statistics=(),
        layer=index,
        far=Far(q_far, lent.keys, limit, sharing.sinks),
    )
    first = new.length - new.added
    # The ring takes the newest keys; each place the last that belongs there.
    came = sharing.seated(new.length - 1, part.keys.shape[2]) - first[:, None]
    taken = jnp.take_along_axis(k, jnp.clip(came, 0, t - 1)[:, None, :, None], 2)
    keys = jnp.where((came >= 0)[:, None, :, None], taken, part.keys)
    # Values go where the root put its tokens.
    came = lent.after - first[:, None, None]
    taken = jnp.take_along_axis(v, jnp.clip(came, 0, t - 1)[:, :, None], 3)
    fill = (lent.after >= 0) & (came >= 0)
    values = jnp.where(fill[:, :, None], taken, part.values)
    out, keys, values = lax.optimization_barrier((jnp.moveaxis(out, 3, 1), keys, values))
    return out, keys, values
