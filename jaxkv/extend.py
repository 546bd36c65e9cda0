"""`extend`: the one operation on the cache of a layer.

New tokens meet a cache: they attend to the stored tokens and to each other, and then the policy
keeps the best. A whole prompt is `extend` on a fresh cache, a decode step is `extend` with one
token, and a chunked prompt, a second turn or an endless stream is `extend` again and again.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv import cache as slots
from jaxkv import pages, pool
from jaxkv.attention import Far, attend_slots, visible
from jaxkv.cache import LAYER_AXES, Candidates, LayerCache
from jaxkv.pallas_kernels.decode import decode, put
from jaxkv.pallas_kernels.prompt import prompt
from jaxkv.policies.base import New, Policy, Tokens, protect
from jaxkv.positions import Rotary, Turns, turn
from jaxkv.sharding import constrain_fields
from jaxkv.shared import Sharing


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
    #: What `positions` mean for `rotary`, `[batch, t, pairs]`.
    turns: Turns | None
    rotary: Rotary | None = dataclasses.field(metadata={"static": True})
    #: The cache is known to be empty: slots need not be read.
    fresh: bool = dataclasses.field(metadata={"static": True})


def new_tokens(
    seen: Int[Array, " batch"],
    added: Int[Array, " batch"],
    t: int,
    *,
    fresh: bool,
    rotary: Rotary | None = None,
) -> NewTokens:
    """The next `t` tokens of sequences that have `seen` tokens; the first `added` are real.

    `rotary` says how the model rotates queries and keys; None for models that do not.
    """
    offsets = jnp.arange(t)
    positions = jnp.where(offsets < added[:, None], seen[:, None] + offsets, -1).astype(jnp.int32)
    turns = None if rotary is None else rotary.shared_turns(positions)
    return NewTokens(positions, seen + added, added, turns, rotary, fresh)


def extend(
    queries: Float[Array, "batch t heads dim"],
    keys: Float[Array, "batch t kv_heads dim"],
    values: Float[Array, "batch t kv_heads dim"],
    layer: LayerCache,
    new: NewTokens,
    policy: Policy,
    *,
    index: Int[Array, ""],
    window: int | None = None,
    output: Float[Array, "embed heads_dim"] | None = None,
) -> tuple[Float[Array, "batch t heads dim"], LayerCache]:
    """Attends with new tokens to the cache and to themselves, then lets the policy keep the best.

    Args:
      queries, keys, values: of the new tokens, before rotation.
      layer: the cache of this layer.
      new: positions and padding of the new tokens.
      policy: whose order decides.
      index: number of this layer, a traced int32 scalar.
      window: the model's own sliding window in tokens, if it has one.
      output: weight of the output projection, for policies that weigh values by it.

    Returns:
      The attention output, and the layer with at most `layer.budget` tokens per KV head stored
      (more after steps, if the policy drops tokens only when a prompt is read, or in bursts).

    """
    out, layer, _ = extend_root(
        queries, keys, values, layer, new, policy, None, index=index, window=window, output=output
    )
    return out, layer


def extend_root(
    queries: Float[Array, "batch t heads dim"],
    keys: Float[Array, "batch t kv_heads dim"],
    values: Float[Array, "batch t kv_heads dim"],
    layer: LayerCache,
    new: NewTokens,
    policy: Policy,
    far: Sharing | None,
    *,
    index: Int[Array, ""],
    window: int | None = None,
    output: Float[Array, "embed heads_dim"] | None = None,
) -> tuple[Float[Array, "batch t heads dim"], LayerCache, Any]:
    """`extend`; at a step it also tells the log-sum-exp of logits with what `far` calls distant."""
    batch, t, heads, dim = queries.shape
    kv_heads = keys.shape[2]
    grouped = jnp.moveaxis(queries.reshape(batch, t, kv_heads, heads // kv_heads, dim), 1, 3)
    came = New(
        queries=grouped,
        turned=grouped,
        keys=jnp.moveaxis(keys, 1, 2),
        values=jnp.moveaxis(values, 1, 3),
        positions=new.positions,
        rotary=new.rotary,
        window=window,
        output=output,
        layer=index,
    )
    if t == 1 and not new.fresh:
        out, layer, told = _extend_by_one(came, layer, new, policy, far)
        out = out.reshape(batch, 1, heads, dim)
    else:
        (out, layer), told = _extend_by_block(came, layer, new, policy), None
        out = jnp.moveaxis(out, 3, 1).reshape(batch, t, heads, dim)
    return out, constrain_fields(layer, LAYER_AXES), told


def _extend_by_one(came, layer, new, policy, far):
    position = came.positions[:, 0]
    q, k = _as_stored(came, new, policy)
    q, k, v = q[:, :, :, 0], k[:, :, 0], came.values[..., 0]
    trait = policy.trait(came)[..., 0] if policy.needs_traits else None
    layer = slots.note(layer, position, trait)
    by_head = layer.by_head()
    statistics = policy.collect(step=True)
    plain = _is_plain(layer, policy, came.rotary)
    # Attention may add to the scores itself.
    onto = layer.scores if plain and policy.accumulates else None
    if plain:
        batch, kv_heads, group, dim = q.shape
        out, keys, values, received, told = decode(
            q.reshape(batch, kv_heads * group, dim),
            k,
            v,
            layer.keys,
            layer.values,
            by_head,
            layer.free,
            position,
            onto,
            came.layer,
            statistics=statistics,
            window=came.window,
            far=far,
        )
    else:  # not of layers that share keys
        told = None
        keys, values = put(layer.keys, layer.values, k, v, layer.free)
    layer = dataclasses.replace(layer, keys=keys, values=values)
    q, turned_keys = _turn_one(q, layer, position, policy, came.rotary)
    came = came._replace(turned=q[:, :, :, None])
    layer, queries = _note_queries(layer, came, new)
    as_one_row = layer.starts is not None and policy.tokenwise
    rows = layer.positions if as_one_row else by_head
    tokens = _tokens_of_step(came, new, layer, rows, turned_keys, queries)
    if not plain:
        out, layer, received = _attend_in_parts(
            q, k, came, layer, policy, tokens, by_head, turned_keys, statistics
        )
        if as_one_row:
            # What a slot got from other heads than its own is 0.
            received = tuple(jnp.sum(x, 1, keepdims=True) for x in received)
    tokens = tokens._replace(received=received)
    if policy.needs_scores:
        remembered = policy.remember(tokens) if onto is None else received[0]
        tokens = tokens._replace(scores=remembered)
        if remembered.shape != layer.positions.shape:
            remembered = jnp.sum(jnp.where(layer.own(), remembered, 0.0), 1, keepdims=True)
        layer = dataclasses.replace(layer, scores=remembered)

    if policy.drops == "always":
        return out, slots.free_next(layer, _priority(policy, tokens)), told
    if policy.drops == "never" and layer.starts is None:
        return out, slots.advance(layer, new.added), told
    if policy.drops == "bursts":
        full = layer.stored() >= layer.budget + policy.burst

        def cut(layer):
            keep = slots.keep_best(_priority(policy, tokens), by_head, layer.budget)
            return slots.drop(layer, keep | ~full[..., None])

        layer = lax.cond(jnp.any(full), cut, lambda layer: layer, layer)
    return out, slots.next_empty(layer), told


def _is_plain(layer, policy, rotary):
    """Whether a step reads every slot as it is stored: then it is one operation."""
    turned = rotary is not None and policy.positions != "original"
    return layer.starts is None and policy.selects == "all" and not turned


def _attend_in_parts(q, k, came, layer, policy, tokens, by_head, turned_keys, statistics):
    """A step that reads a pool, or a selection, or keys that are rotated as they are read."""
    position = came.positions[:, 0]
    if layer.bounds is not None:
        layer = pages.note(layer, k, position)
        most, count = policy.most_pages(), policy.pages(layer.budget)
        return pages.attend(q, layer, position, most=most, pages=count), layer, ()
    seen = visible(position[:, None, None], by_head, came.window)
    if policy.selects == "slots":
        seen &= policy.select(tokens, q)
    batch, kv_heads, group, dim = q.shape
    out, received = attend_slots(
        q.reshape(batch, kv_heads * group, dim),
        turned_keys,
        layer.values,
        seen,
        statistics=statistics,
        query_positions=position,
        key_positions=by_head,
        layer=came.layer,
    )
    return out, layer, received


def _tokens_of_step(came, new, layer, positions, turned_keys, queries):
    budget = layer.budget[..., None]
    if positions.shape[1] == budget.shape[1]:
        stored = _rows(layer, positions)
        turned_keys = jnp.broadcast_to(turned_keys, stored.keys.shape)
    else:
        # A pool as if it were one head, of which each slot has a budget of its own.
        stored = slots.candidates(layer)
        budget = jnp.sum(jnp.where(layer.own(), budget, 0), 1, keepdims=True)
    tokens = _tokens(came, new, layer.budget, stored, turned_keys, queries, step=True)
    return tokens._replace(budget=budget)


def _extend_by_block(came, layer, new, policy):
    rows = layer if layer.starts is None else pool.spread(layer)
    q, k = _as_stored(came, new, policy)
    positions = jnp.broadcast_to(new.positions[:, None], k.shape[:3])
    block = Candidates(
        k,
        came.values,
        positions,
        jnp.zeros(positions.shape, jnp.float32) if policy.needs_scores else None,
        policy.trait(came) if policy.needs_traits else None,
    )
    everyone = block if new.fresh else slots.join(slots.candidates(rows), block)
    q, turned_keys, far = _turn_block(q, everyone, rows, new, policy, came.rotary)
    if policy.simulates:
        out = policy.simulate(q, turned_keys, everyone.values, rows.budget)
        received: tuple[Array, ...] = ()
    else:
        out, received = prompt(
            q,
            new.positions,
            turned_keys,
            everyone.values,
            everyone.positions,
            window=came.window,
            statistics=policy.collect(step=False),
            layer=came.layer,
            far=far,
        )
    came = came._replace(turned=q)
    rows, queries = _note_queries(rows, came, new)
    tokens = _tokens(came, new, rows.budget, everyone, turned_keys, queries, step=False)
    tokens = tokens._replace(received=received)
    if policy.needs_scores:
        tokens = tokens._replace(scores=policy.remember(tokens))
        everyone = everyone._replace(scores=tokens.scores)
    if policy.weighs_layers:
        weight = jnp.where((new.added > 0)[:, None], policy.weigh(tokens), rows.weight)
        rows = dataclasses.replace(rows, weight=weight)

    keep, budget = everyone.positions >= 0, rows.budget
    # Policies that judge a prompt when all of it has been read cut it elsewhere.
    if policy.evicts and not policy.afterwards:
        priority = _priority(policy, tokens)
        if policy.pooled:
            idle = (new.added == 0)[:, None]
            shared = policy.allot(priority, everyone.positions, budget)
            budget = jnp.where(idle, budget, shared)
        best = slots.keep_best(priority, everyone.positions, budget)
        # A row that only waits for others keeps what it has.
        keep = jnp.where((new.added > 0)[:, None, None], best, keep)
    layer = _store(layer, rows, everyone, keep, budget, new, policy)
    # Compress before the next layer starts, else every layer's whole block stays in memory.
    return lax.optimization_barrier((out, layer))


def _as_stored(came, new, policy):
    """Queries and keys of new tokens as the cache holds keys: rotated to their own positions under
    "original" ones, as they come under the others.
    """
    queries, keys = came.queries, came.keys
    if came.rotary is None or policy.positions != "original":
        return queries, keys
    cos, sin = (x[:, None] for x in new.turns)
    return turn(queries, (cos[:, :, None], sin[:, :, None])), turn(keys, (cos, sin))


def _turn_one(q, layer, position, policy, rotary):
    """The query of a step and the stored keys as they meet."""
    if rotary is None or policy.positions == "original":
        return q, layer.keys
    if policy.positions == "rolling":
        newest = layer.stored()[..., None] - 1
        return (
            rotary.at_ranks(q, newest, layer.slots),
            rotary.at_ranks(layer.keys, layer.ranks, layer.slots),
        )
    # Only distances count. Those below the limit are below the number of slots.
    limit = policy.limit(layer.budget)[..., None]
    distance = jnp.clip(position[:, None, None] - layer.positions, 0, limit)
    top = policy.max_distance or layer.slots
    turned = rotary(q, jnp.full((1, 1, 1), top))
    return turned, rotary.at_ranks(layer.keys, top - distance, top + 1)


def _turn_block(q, everyone, rows, new, policy, rotary):
    """The queries of a block and all keys as they meet, and how far tokens are seen, if bounded."""
    if rotary is None or policy.positions == "original":
        return q, everyone.keys, None
    t = q.shape[3]
    if policy.positions == "rolling":
        # Stored tokens sit at their ranks, the block's tokens follow.
        ranks = rows.stored()[..., None] + jnp.arange(t)
        turned = rotary(q, ranks[:, :, None])
        if not new.fresh:
            ranks = jnp.concatenate([rows.ranks, ranks], 2)
        return turned, rotary(everyone.keys, ranks), None
    # Only distances count; positions are counted from before what the block sees exactly.
    limit = policy.limit(rows.budget)[..., None]
    start = (new.length - 1)[:, None, None] - limit - t
    far = Far(rotary(q, limit[..., None]), everyone.keys, limit)
    places = jnp.maximum(everyone.positions - start, 0)
    turned = rotary(q, (new.positions[:, None] - start)[:, :, None])
    return turned, rotary(everyone.keys, places), far


def _store(layer, rows, everyone, keep, budget, new, policy):
    """Puts the marked tokens into slots."""
    if layer.starts is not None:
        return pool.pack(everyone, keep, budget, layer.slots, ranks=layer.ranks is not None)
    t = new.positions.shape[1]
    before = keep.shape[-1] - t
    keep_old = keep[..., :before] if before else jnp.zeros_like(rows.positions, bool)
    if before and everyone.scores is not None:
        rows = dataclasses.replace(rows, scores=everyone.scores[..., :before])
    keep_new = keep[..., before:] if policy.stores else jnp.zeros_like(keep[..., before:])
    layer = slots.merge(rows, everyone.last(t), keep_old, keep_new)
    return layer if layer.bounds is None else pages.note_all(layer)


def _rows(layer, by_head):
    """The stored tokens as each KV head sees them."""
    stored = slots.candidates(layer)
    if layer.starts is None:
        return stored
    shape = by_head.shape

    def spread(array, *rest):
        return None if array is None else jnp.broadcast_to(array, (*shape[:2], *rest))

    slots_dim = (shape[2], stored.keys.shape[3])
    return Candidates(
        spread(stored.keys, *slots_dim),
        spread(stored.values, *slots_dim[::-1]),
        by_head,
        spread(stored.scores, shape[2]),
        spread(stored.traits, shape[2]),
    )


def _note_queries(layer, came, new):
    """Remembers the last queries; gives the layer, and them in the order of their positions."""
    if layer.queries is None:
        return layer, None
    recent = layer.queries.shape[3]
    # The position that belongs at each place of the ring, and the new token that has it.
    place = jnp.arange(recent)
    last = (new.length - 1)[:, None]
    position = last - (last - place) % recent
    source = position - (new.length - new.added)[:, None]
    t = came.turned.shape[3]
    at = jnp.clip(source, 0, t - 1)[:, None, None, :, None]
    fresh = (source >= 0)[:, None, None, :, None]
    ring = jnp.where(fresh, jnp.take_along_axis(came.turned, at, 3), layer.queries)
    order = (last + 1 + place) % recent
    queries = jnp.take_along_axis(ring, order[:, None, None, :, None], 3)
    return dataclasses.replace(layer, queries=ring), queries


def _tokens(came, new, budget, everyone, turned_keys, queries, *, step):
    return Tokens(
        positions=everyone.positions,
        scores=everyone.scores,
        traits=everyone.traits,
        received=(),
        newest=(new.length - 1)[:, None, None],
        budget=budget[..., None],
        keys=everyone.keys,
        values=everyone.values,
        turned_keys=turned_keys,
        queries=queries,
        layer=came.layer,
        step=step,
        new=came,
    )


def judge(
    policy: Policy, layer: LayerCache, length: Int[Array, " batch"], index: Int[Array, ""]
) -> Float[Array, "batch kv_heads slots"]:
    """The priority of stored tokens when none are new; not for pools."""
    batch, kv_heads, _, dim = layer.keys.shape
    none = jnp.zeros((batch, kv_heads, 0, dim), layer.keys.dtype)
    came = New(
        queries=none[:, :, None],
        turned=none[:, :, None],
        keys=none,
        values=jnp.swapaxes(none, 2, 3),
        positions=jnp.zeros((batch, 0), jnp.int32),
        rotary=None,
        window=None,
        output=None,
        layer=index,
    )
    new = NewTokens(came.positions, length, jnp.zeros_like(length), None, None, fresh=False)
    stored = slots.candidates(layer)
    tokens = _tokens(came, new, layer.budget, stored, stored.keys, None, step=False)
    return _priority(policy, tokens)


def _priority(policy, tokens):
    # Whatever the policy says: the newest token is above all, empty slots are below all.
    limits = jnp.finfo(jnp.float32)
    priority = jnp.clip(policy.priority(tokens), limits.min, limits.max)
    priority = jnp.broadcast_to(priority, tokens.positions.shape).astype(jnp.float32)
    return protect(tokens.positions == tokens.newest, priority)
