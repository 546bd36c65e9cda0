"""`follow_merged`: the second of two layers whose keys and values are merged (MiniCache, arXiv
2405.14366).

For each token one direction is stored, which lies between those of the two keys (and one for the
values), and the length of each. When both layers have run, keys and values of the first, the root,
are turned to the common direction. The second stores what they are to be stretched by, and whole
those tokens whose directions lie farthest apart: these are not merged, and the root's stay.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv import cache as slots
from jaxkv.attention import visible
from jaxkv.cache import LayerCache, keep_best
from jaxkv.pallas_kernels.decode import put
from jaxkv.pallas_kernels.prompt import prompt
from jaxkv.shared import WHOLE

_MASKED = -1e30


def _between(
    first: Float[Array, "*shape dim"], second: Float[Array, "*shape dim"], toward: float
) -> tuple[Float[Array, "*shape dim"], Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The first turned towards the second (spherical interpolation), what that is multiplied by to
    be as long as the second, and the angle between them as a share of a half turn; float32.
    """
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    lengths = [jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (first, second)]
    tiny = jnp.finfo(jnp.float32).tiny
    u, v = (x / jnp.maximum(n, tiny) for x, n in zip((first, second), lengths, strict=True))
    # Exact for small angles too, where the arc cosine of a product is not.
    angle = 2 * jnp.arctan2(
        jnp.linalg.norm(u - v, axis=-1, keepdims=True),
        jnp.linalg.norm(u + v, axis=-1, keepdims=True),
    )
    # As sines of parts over the sine of the whole; without a turn, as of straight lines.
    flat = jnp.sin(angle) < 1e-6
    sine = jnp.where(flat, 1.0, jnp.sin(angle))
    weights = (jnp.where(flat, part, jnp.sin(part * angle) / sine) for part in (1 - toward, toward))
    of_first, of_second = weights
    stretch = lengths[1] / jnp.maximum(lengths[0], tiny)
    turned = (of_first * u + of_second * v) * lengths[0]
    return turned, stretch[..., 0], angle[..., 0] / jnp.pi


def _merged_pair(root: Any, own: Any, toward: float) -> Any:
    """Keys and values `(keys [..., dim], values [..., dim])` of both layers: the root's turned,
    stretches `[..., 2]`, and the sum of both distances.
    """
    turned, stretches, angles = zip(
        *(_between(a, b, toward) for a, b in zip(root, own, strict=True)), strict=True
    )
    return turned, jnp.stack(stretches, -1), angles[0] + angles[1]


def _held(
    positions: Int[Array, "batch kv_heads slots"], whole: LayerCache
) -> Bool[Array, "batch kv_heads places"]:
    """Which whole tokens are in the root's slots, where `positions` are."""
    assert whole.traits is not None
    at = whole.traits.astype(jnp.int32)
    there = jnp.take_along_axis(positions, jnp.clip(at, 0, positions.shape[-1] - 1), -1)
    return (whole.positions >= 0) & (there == whole.positions)


def follow_merged(q, k, v, part, lent, new, merge, window, index):
    """Attends with rotated queries `[batch, t, kv_heads, group, dim]` to what is merged and to what
    is whole.

    Returns:
      The output, the part with the new tokens, and the root's keys and values as they are now.

    """
    step = q.shape[1] == 1 and not new.fresh
    follow = _follow_step if step else _follow_block
    count = jnp.sum(lent.after >= 0, -1, dtype=jnp.int32)
    part = dataclasses.replace(part, count=count)
    out, part, keys, values = follow(q, k, v, part, lent, new, merge, window, index)
    return out, part, (keys, values)


def _follow_step(q, k, v, part, lent, new, merge, window, index):
    del index
    b, h = jnp.arange(q.shape[0])[:, None], jnp.arange(q.shape[2])[None]
    position, root, free = new.positions[:, 0], lent.layer, lent.free
    # The new token is whole at first.
    place = part.whole.free
    whole = slots.note(part.whole, position, free.astype(jnp.float32))
    keys, values = put(whole.keys, whole.values, k[:, 0], v[:, 0], place)
    came = (root.keys[b, h, free], root.values[b, h, :, free])
    _, _, apart = _merged_pair(came, (k[:, 0], v[:, 0]), merge.toward)
    assert whole.scores is not None
    scores = whole.scores.at[b, h, place].set(apart)
    whole = dataclasses.replace(whole, keys=keys, values=values, scores=scores)
    stretch = part.stretch.at[b, h, :, free].set(WHOLE)

    seen_root = visible(position[:, None, None], lent.positions, window)[:, :, 0]
    seen_root &= stretch[:, :, 0] >= 0
    seen_whole = visible(position[:, None, None], whole.positions, window)[:, :, 0]
    out = _attend_both(q[:, 0], root, stretch, seen_root, whole, seen_whole)

    # The nearest of the whole tokens is merged, unless there is room for all.
    still = dataclasses.replace(whole, budget=merge.budget(part.count))
    still = slots.drop(still, _held(lent.after, whole))
    left = slots.free_next(still, scores)
    out_of = left.free
    leaves = still.positions[b, h, out_of] >= 0
    assert whole.traits is not None
    at = jnp.where(leaves, whole.traits[b, h, out_of].astype(jnp.int32), root.slots)
    pair = (root.keys[b, h, at], root.values[b, h, :, at])
    own = (whole.keys[b, h, out_of], whole.values[b, h, :, out_of])
    (turned_keys, turned_values), stretches, _ = _merged_pair(pair, own, merge.toward)
    put_away = {"mode": "drop", "unique_indices": True}
    keys = root.keys.at[b, h, at].set(turned_keys.astype(root.keys.dtype), **put_away)
    values = root.values.at[b, h, :, at].set(turned_values.astype(root.values.dtype), **put_away)
    stretch = stretch.at[b, h, :, at].set(stretches.astype(stretch.dtype), **put_away)
    part = dataclasses.replace(part, stretch=stretch, whole=left)
    return out[:, None], part, keys, values


def _attend_both(q, root, stretch, seen_root, whole, seen_whole):
    """Queries `[batch, kv_heads, group, dim]` over what is merged and what is whole."""
    dim = q.shape[-1]

    def logits_of(keys: Array) -> Array:
        return jnp.einsum("bksd,bkgd->bkgs", keys, q, preferred_element_type=jnp.float32)

    def read(values: Array, weights: Array) -> Array:
        weights = weights.astype(values.dtype)
        return jnp.einsum("bkds,bkgs->bkgd", values, weights, preferred_element_type=jnp.float32)

    of_root = logits_of(root.keys) * stretch[:, :, None, 0]
    logits = jnp.concatenate([of_root, logits_of(whole.keys)], -1) * dim**-0.5
    seen = jnp.concatenate([seen_root, seen_whole], -1)[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen, logits, _MASKED), -1)
    # A sequence that has ended sees nothing and gives nothing.
    weights = jnp.where(seen, weights, 0.0)
    merged, apart = jnp.split(weights, [root.slots], -1)
    out = read(root.values, merged * stretch[:, :, None, 1]) + read(whole.values, apart)
    return out.astype(q.dtype)


def _follow_block(q, k, v, part, lent, new, merge, window, index):
    batch, t, kv_heads = k.shape[:3]
    b, h = jnp.arange(batch)[:, None, None], jnp.arange(kv_heads)[None, :, None]
    root, whole = lent.layer, part.whole
    k, v = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 3)
    met_keys, met_values = k, v
    first = new.length - new.added
    # Of each slot of the root: whether this layer's own key and value are known, and these.
    source = lent.after - first[:, None, None]
    came = (lent.after >= 0) & (source >= 0)
    own_keys, own_values = slots.gather(k, v, jnp.clip(source, 0, t - 1))
    exact = came
    if not new.fresh:
        at = jnp.where(_held(lent.before, whole), whole.traits.astype(jnp.int32), root.slots)
        before_keys, before_values = lent.keys[:, :, :-t], lent.values[..., :-t]
        keys = before_keys * part.stretch[:, :, 0, :, None]
        values = before_values * part.stretch[:, :, 1, None, :]
        keys = keys.at[b, h, at].set(whole.keys, mode="drop")
        values = values.at[b, h, :, at].set(jnp.swapaxes(whole.values, 2, 3), mode="drop")
        met_keys, met_values = (
            jnp.concatenate([keys, k], 2),
            jnp.concatenate([values, v], 3),
        )
        own_keys = jnp.where(came[..., None], own_keys, keys)
        own_values = jnp.where(came[:, :, None], own_values, values)
        known = jnp.zeros(came.shape, bool).at[b, h, at].set(True, mode="drop")
        exact = came | (known & (lent.after == lent.before))
    out, _ = prompt(
        jnp.moveaxis(q, 1, 3),
        new.positions,
        met_keys,
        met_values,
        lent.positions,
        window=window,
        statistics=(),
        layer=index,
    )

    pair = (root.keys, jnp.swapaxes(root.values, 2, 3))
    own = (own_keys, jnp.swapaxes(own_values, 2, 3))
    (turned_keys, turned_values), stretches, apart = _merged_pair(pair, own, merge.toward)
    budget = merge.budget(part.count)
    positions = jnp.where(exact, lent.after, -1)
    keep = keep_best(apart, positions, budget)
    leaves = exact & ~keep
    keys = jnp.where(leaves[..., None], turned_keys.astype(root.keys.dtype), root.keys)
    values = jnp.where(
        leaves[:, :, None], jnp.swapaxes(turned_values, 2, 3).astype(root.values.dtype), root.values
    )
    stretch = jnp.where(leaves[:, :, None], jnp.swapaxes(stretches, 2, 3), part.stretch)
    stretch = jnp.where(keep[:, :, None], WHOLE, stretch).astype(part.stretch.dtype)

    # The whole ones first, in the order of their slots.
    places = min(whole.slots, root.slots)
    order = jnp.argsort(~keep, axis=-1, stable=True)[..., :places]
    kept = jnp.take_along_axis(keep, order, -1)
    kept_keys, kept_values = slots.gather(own_keys, own_values, order)
    found = jnp.where(kept, jnp.take_along_axis(positions, order, -1), -1)
    last = ((0, 0), (0, 0), (0, whole.slots - places))
    whole = dataclasses.replace(
        whole,
        keys=jnp.pad(kept_keys, (*last, (0, 0))),
        values=jnp.pad(kept_values, ((0, 0), *last)),
        positions=jnp.pad(found, last, constant_values=-1),
        scores=jnp.pad(jnp.take_along_axis(apart, order, -1), last),
        traits=jnp.pad(order.astype(jnp.float32), last),
        budget=budget,
    )
    whole = slots.next_empty(whole)
    part = dataclasses.replace(part, stretch=stretch, whole=whole)
    return jnp.moveaxis(out, 3, 1), part, keys, values
