"""`extend_layer`: `extend` for layers whose KV heads may follow those of an earlier layer.

Groups of heads that are their own root are extended as any other, by the policy; what they met and
kept is lent to the layers that follow. A group that follows attends to near tokens with its own
keys and to distant ones with its root's, and stores what its root stores.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import cache as slots
from jaxkv.attention import Far, attend_slots, visible
from jaxkv.cache import LayerCache
from jaxkv.extend import NewTokens, extend, extend_root
from jaxkv.merged import follow_merged
from jaxkv.pallas_kernels.decode_shared import Pieces, decode_groups
from jaxkv.pallas_kernels.prompt import prompt
from jaxkv.policies.base import Policy
from jaxkv.positions import turn
from jaxkv.shared import (
    Follower,
    Group,
    Lent,
    Merged,
    Part,
    SharedLayer,
    by_head,
    constrain_part,
    take_heads,
)


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
    ready = _Ready.of(grouped, keys, new, far_map, layer.parts)
    step = t == 1 and not new.fresh
    parts: list[Part] = list(layer.parts)
    lent: list[Lent | None] = [
        given if group.lends else None
        for group, given in zip(layer.groups, layer.lent, strict=True)
    ]
    returned: list[Any] = [None] * len(parts)
    #: Outputs, and the groups that they are of.
    outs: list[tuple[tuple[Group, ...], Array]] = []
    #: Groups that take a step in one call.
    together: list[int] = []
    for i, (group, part, given) in enumerate(
        zip(layer.groups, layer.parts, layer.lent, strict=True)
    ):
        if isinstance(part, LayerCache):
            q, k, v = (take_heads(x, group.heads, 2) for x in (grouped, keys, values))
            weight = None if output is None else _columns(output, group.heads, kv_heads)
            out, parts[i], lent[i] = _extend_group(
                q, k, v, part, group, new, policy, sharing, output=weight, **options
            )
        elif step and isinstance(part, Follower) and not sharing.values:
            together.append(i)
            continue
        else:
            assert ready is not None
            q, q_far, k = (take_heads(x, group.heads, 2) for x in ready)
            v = take_heads(values, group.heads, 2)
            out, parts[i], returned[i] = _follow(
                q, q_far, k, v, part, given, new, sharing, index, window
            )
        outs.append(((group,), out))
    if together:
        out, changed = _follow_step(ready, values, layer, together, new, sharing, window)
        outs.append((tuple(layer.groups[i] for i in together), out))
        for i, part in zip(together, changed, strict=True):
            parts[i] = part
    order = [group for groups, _ in outs for group in groups]
    out = by_head(order, [out for _, out in outs], 2).reshape(queries.shape)
    parts = list(map(constrain_part, parts))
    return out, SharedLayer(tuple(parts), layer.groups, tuple(lent), tuple(returned))


class _Ready(NamedTuple):
    """What groups that follow meet keys with, rotated; all heads of a layer at once, since many
    small operations would take longer than the few that are not needed.
    """

    queries: Float[Array, "batch t kv_heads group dim"]
    #: For the keys of another layer.
    far_queries: Float[Array, "batch t kv_heads group dim"]
    keys: Float[Array, "batch t kv_heads dim"]

    @classmethod
    def of(
        cls,
        queries: Float[Array, "batch t kv_heads group dim"],
        keys: Float[Array, "batch t kv_heads dim"],
        new: NewTokens,
        far_map: Float[Array, "heads dim dim"] | None,
        parts: Sequence[Part],
    ) -> "_Ready | None":
        """None if no group follows."""
        if all(isinstance(part, LayerCache) for part in parts):
            return None
        near = far = turned(queries, new)
        if far_map is not None:
            maps = far_map.reshape(*queries.shape[2:4], *far_map.shape[1:])
            # With heads in front: XLA on CPU multiplies in this order twice as fast.
            mapped = jnp.einsum("btkgd,kgde->kgbte", queries, maps)
            far = turned(jnp.moveaxis(mapped, (0, 1), (2, 3)), new)
        return cls(near, far, turned(keys, new))


def _columns(output: Array, heads: Sequence[int], kv_heads: int) -> Array:
    """The columns of an output projection that belong to some KV heads."""
    columns = output.reshape(output.shape[0], kv_heads, -1)
    return take_heads(columns, heads, 1).reshape(output.shape[0], -1)


def turned(x: Array, new: NewTokens) -> Array:
    """Queries or keys `[batch, t, ..., dim]`, rotated to the positions of the new tokens."""
    if new.turns is None:
        return x
    inner = (1,) * (x.ndim - 3)
    cos, sin = (a.reshape(*a.shape[:2], *inner, a.shape[-1]) for a in new.turns)
    return turn(x, (cos, sin))


def _extend_group(q, k, v, part, group, new, policy, sharing, **options):
    """`extend` for heads that are their own root: output, cache, and what later layers need."""
    batch, t, *_ = q.shape
    predicts = sharing.skip is not None and sharing.skip[0] == "predicted"
    out, after, far = extend_root(
        q.reshape(batch, t, -1, q.shape[-1]),
        *(k, v, part, new, policy, sharing if predicts and group.lends else None),
        **options,
    )
    lent = _lend(k, v, part, after, far, new, sharing) if group.lends else None
    return out.reshape(q.shape), after, lent


def _lend(k, v, before, after, far, new, sharing):
    """What the layers that follow need to know of a root that has been extended."""
    if k.shape[1] > 1 or new.fresh:
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
    return Lent(
        keys=after.keys,
        values=after.values if sharing.values else None,
        positions=met,
        before=before.positions,
        after=after.positions,
        free=before.free,
        ring=_slots_of_ring(met, new, sharing),
        far=far,
        layer=after if sharing.merge else None,
    )


def _slots_of_ring(met, new, sharing):
    """The slots of the tokens in the ring; beyond the last slot for those that are not stored."""
    batch, kv_heads, count = met.shape
    last = new.length - 1
    if not sharing.evicts:
        held = sharing.seated(last, min(sharing.near, count))
        ring = jnp.where(held < 0, count, held)[:, None]
        return jnp.broadcast_to(ring, (batch, kv_heads, ring.shape[-1]))
    near = (met >= 0) & sharing.is_near(last[:, None, None], met)
    seat = jnp.where(near, sharing.seats(met), sharing.near)
    b, k = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)[None, :, None]
    ring = jnp.full((batch, kv_heads, sharing.near), count)
    return ring.at[b, k, seat].set(jnp.arange(count), mode="drop")


def _follow(q, q_far, k, v, part, lent, new, sharing, index, window):
    """A group that follows: output, cache, and the root's keys and values where they change."""
    if isinstance(part, Merged):
        return follow_merged(q, k, v, part, lent, new, sharing.merge, window, index)
    if sharing.values:
        return *_follow_all(q_far, part, lent, new, index, window), None
    return *_follow_block(q, q_far, k, v, part, lent, new, sharing, index, window), None


def _follow_step(ready, values, layer, together, new, sharing, window):
    """A step of some groups that follow: their output, one after the other, and what they store."""
    parts, lents = ([of[i] for i in together] for of in (layer.parts, layer.lent))
    groups = tuple(
        Pieces(
            part.keys,
            part.values,
            lent.keys,
            lent.positions,
            lent.ring[..., : part.keys.shape[2]],
            lent.free,
            lent.far,
        )
        for part, lent in zip(parts, lents, strict=True)
    )
    out, changed = decode_groups(
        *(x[:, 0] for x in (*ready, values)),
        new.positions[:, 0],
        groups,
        heads=tuple(layer.groups[i].heads for i in together),
        sharing=sharing,
        window=window,
    )
    after = []
    for part, lent, now in zip(parts, lents, changed, strict=True):
        count = jnp.sum(lent.after >= 0, -1, dtype=jnp.int32)
        skipped = None if now.counts is None else part.skipped + now.counts
        after.append(Follower(now.near_keys, now.values, part.budget, count, skipped))
    return out[:, None], after


def _follow_all(q, part, lent, new, index, window):
    """Attends to all that the root attended to; stores nothing."""
    batch, t, kv_heads, group, dim = q.shape
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
    count = jnp.sum(lent.after >= 0, -1, dtype=jnp.int32)
    return out, Follower(keys, values, part.budget, count, part.skipped)
