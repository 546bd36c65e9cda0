"""`extend`: the one operation on the cache of a layer.

New tokens meet a cache: they attend to the stored tokens and to each other, and then the policy
keeps the best. A whole prompt is `extend` on a fresh cache, a decode step is `extend` with one
token, and a chunked prompt, a second turn or an endless stream is `extend` again and again.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv import cache as slots
from jaxkv.attention import attend_block, attend_slots, visible
from jaxkv.cache import LayerCache
from jaxkv.policies.base import Policy, Tokens, protect
from jaxkv.positions import Rotary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NewTokens:
    """What the layers must know about the tokens of one `extend`."""

    #: Positions in the text, counted from the first token ever seen; -1 is padding (at the end).
    positions: Int[Array, "batch t"]
    #: Tokens seen by each sequence, the new ones included.
    length: Int[Array, " batch"]
    #: How many of the new tokens are real.
    added: Int[Array, " batch"]
    #: The cache is known to be empty: slots need not be read.
    fresh: bool = dataclasses.field(metadata={"static": True})


def new_tokens(
    seen: Int[Array, " batch"], added: Int[Array, " batch"], t: int, *, fresh: bool
) -> NewTokens:
    """The next `t` tokens of sequences that have `seen` tokens; the first `added` are real."""
    offsets = jnp.arange(t)
    positions = jnp.where(offsets < added[:, None], seen[:, None] + offsets, -1)
    return NewTokens(positions.astype(jnp.int32), seen + added, added, fresh)


def extend(
    queries: Float[Array, "batch t heads dim"],
    keys: Float[Array, "batch t kv_heads dim"],
    values: Float[Array, "batch t kv_heads dim"],
    layer: LayerCache,
    new: NewTokens,
    policy: Policy,
    *,
    index: Int[Array, ""],
    rotary: Rotary | None = None,
    window: int | None = None,
) -> tuple[Float[Array, "batch t heads dim"], LayerCache]:
    """Attends with new tokens to the cache and to themselves, then lets the policy keep the best.

    Args:
      queries, keys, values: of the new tokens, before rotation.
      layer: the cache of this layer.
      new: positions and padding of the new tokens.
      policy: whose order decides.
      index: number of this layer, a traced int32 scalar.
      rotary: how queries and keys are rotated; None for models without rotary positions.
      window: the model's own sliding window in tokens, if it has one.

    Returns:
      The attention output, and the layer with at most `layer.budget` tokens per KV head stored.

    """
    one = queries.shape[1] == 1 and not new.fresh
    return (_extend_by_one if one else _extend_by_block)(
        queries, keys, values, layer, new, policy, index, rotary, window
    )


def _extend_by_one(queries, keys, values, layer, new, policy, index, rotary, window):
    position = new.positions[:, 0]
    q, k, v = queries[:, 0], keys[:, 0], values[:, 0]
    rolling = policy.positions == "rolling"
    if rotary is not None and not rolling:
        q, k = rotary(q, position[:, None]), rotary(k, position[:, None])
    layer = slots.write(layer, k, v, position)
    stored_keys = layer.keys
    if rotary is not None and rolling:
        newest = layer.stored() - 1
        group = q.shape[1] // k.shape[1]
        q = rotary.at_ranks(q, jnp.repeat(newest, group, 1), layer.slots)
        stored_keys = rotary.at_ranks(stored_keys, layer.ranks, layer.slots)
    seen = visible(position[:, None, None], layer.positions, window)[:, :, 0]
    out, received = attend_slots(
        q, stored_keys, layer.values, seen, column_sums=policy.needs_scores
    )
    if not policy.evicts:
        return out[:, None], slots.advance(layer, new.added)
    if received is not None:
        layer = dataclasses.replace(layer, scores=layer.scores + received)
    priority = _priority(
        policy, layer, new, index, layer.positions, layer.scores, layer.keys, layer.values
    )
    return out[:, None], slots.free_next(layer, priority)


def _extend_by_block(queries, keys, values, layer, new, policy, index, rotary, window):
    batch, t, heads, dim = queries.shape
    kv_heads = keys.shape[2]
    q = jnp.moveaxis(queries.reshape(batch, t, kv_heads, heads // kv_heads, dim), 1, 3)
    k = jnp.moveaxis(keys, 1, 2)
    v = jnp.moveaxis(values, 1, 3)
    rolling = policy.positions == "rolling"
    positions = jnp.broadcast_to(new.positions[:, None], (batch, kv_heads, t))
    if rotary is not None and not rolling:
        q, k = rotary(q, positions[:, :, None]), rotary(k, positions)

    all_keys, all_values, all_positions = k, v, positions
    if not new.fresh:
        all_keys = jnp.concatenate([layer.keys, k], 2)
        all_values = jnp.concatenate([layer.values, v], 3)
        all_positions = jnp.concatenate([layer.positions, positions], 2)
    read_keys = all_keys
    if rotary is not None and rolling:
        # Stored tokens sit at their ranks, the block's tokens follow.
        ranks = layer.stored()[..., None] + jnp.arange(t)
        q = rotary(q, ranks[:, :, None])
        read_keys = rotary(
            all_keys, ranks if new.fresh else jnp.concatenate([layer.ranks, ranks], 2)
        )
    out, received = attend_block(
        q,
        new.positions,
        read_keys,
        all_values,
        all_positions,
        window=window,
        column_sums=policy.needs_scores,
    )
    out = jnp.moveaxis(out, 3, 1).reshape(batch, t, heads, dim)

    before = 0 if new.fresh else layer.slots
    old_scores, new_scores = layer.scores, None
    if received is not None:
        if not new.fresh:
            old_scores = layer.scores + received[..., :before]
        new_scores = received[..., before:]
        received = jnp.concatenate([old_scores, new_scores], 2) if before else new_scores
    keep = all_positions >= 0
    if policy.evicts:
        priority = _priority(
            policy, layer, new, index, all_positions, received, all_keys, all_values
        )
        keep = slots.keep_best(priority, all_positions, layer.budget)
    keep_old = keep[..., :before] if before else jnp.zeros_like(layer.positions, bool)
    layer = dataclasses.replace(layer, scores=old_scores)
    layer = slots.merge(layer, k, v, positions, new_scores, keep_old, keep[..., before:])
    # Compress before the next layer starts, else every layer's whole block stays in memory.
    return jax.lax.optimization_barrier((out, layer))


def _priority(policy, layer, new, index, positions, scores, keys, values):
    newest = (new.length - 1)[:, None, None]
    tokens = Tokens(
        positions=positions,
        scores=scores,
        newest=newest,
        budget=layer.budget[..., None],
        keys=keys,
        values=values,
        layer=index,
    )
    # Whatever the policy says: the newest token is above all, empty slots are below all.
    limits = jnp.finfo(jnp.float32)
    priority = jnp.clip(policy.priority(tokens), limits.min, limits.max)
    return protect(positions == newest, priority.astype(jnp.float32))
