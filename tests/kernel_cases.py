"""Arguments for the operations of `jaxkv.pallas_kernels`, with NaN wherever nothing may be read."""

import jax.numpy as jnp
import numpy as np


def decode(seed, batch, kv_heads, group, dim, slots, dtype=jnp.float32, onto=True):
    """One new token per sequence over slots that are full, or half full, or (third sequence) of a
    sequence that has ended. Returns the arguments, and which slots hold a token.
    """
    rng = np.random.default_rng(seed)
    positions = np.full((batch, kv_heads, slots), -1, np.int32)
    free = np.zeros((batch, kv_heads), np.int32)
    position = rng.integers(slots, 2 * slots, batch).astype(np.int32)
    position[2:3] = -1
    for row in range(batch):
        stored = slots - 1 if row == 0 else slots // 2
        for head in range(kv_heads):
            order = rng.permutation(slots)
            positions[row, head, order[:stored]] = rng.permutation(slots)[:stored]
            free[row, head] = order[-1]
            positions[row, head, order[-1]] = position[row]
    there = positions >= 0
    # The free slot still holds what was evicted.
    there_before = there & (np.arange(slots) != free[..., None])

    def normal(*shape):
        return jnp.array(rng.normal(size=shape), dtype)

    keys, values = normal(batch, kv_heads, slots, dim), normal(batch, kv_heads, dim, slots)
    scores = np.where(there_before, rng.random(there.shape), 0).astype(np.float32)
    arguments = (
        normal(batch, kv_heads * group, dim),
        normal(batch, kv_heads, dim),
        normal(batch, kv_heads, dim),
        jnp.where(there_before[..., None], keys, jnp.nan),
        jnp.where(there_before[:, :, None], values, jnp.nan),
        jnp.array(positions),
        jnp.array(free),
        jnp.array(position),
        jnp.array(scores) if onto else None,
        jnp.int32(0),
    )
    return arguments, there


def prompt(seed, batch, kv_heads, group, dim, t, stored, dtype=jnp.float32):
    """A block of `t` new tokens behind `stored` slots. The second sequence has fewer new tokens and
    fewer stored ones, the third has none of either.
    """
    rng = np.random.default_rng(seed)
    seen = [2 * stored, stored, 0][:batch]
    added = np.array([t, t // 2 + 3, 0][:batch])
    held = [stored, stored // 3, 0][:batch]
    new = np.where(np.arange(t) < added[:, None], np.array(seen)[:, None] + np.arange(t), -1)
    positions = np.full((batch, kv_heads, stored + t), -1, np.int32)
    for row in range(batch):
        for head in range(kv_heads):
            slots = rng.permutation(stored)[: held[row]]
            positions[row, head, slots] = rng.permutation(max(seen[row], 1))[: held[row]]
        positions[row, :, stored:] = new[row]

    def normal(*shape):
        return jnp.array(rng.normal(size=shape), dtype)

    there = positions >= 0
    keys, values = (
        normal(batch, kv_heads, stored + t, dim),
        normal(batch, kv_heads, dim, stored + t),
    )
    return (
        normal(batch, kv_heads, group, t, dim),
        jnp.array(new.astype(np.int32)),
        jnp.where(there[..., None], keys, jnp.nan),
        jnp.where(there[:, :, None], values, jnp.nan),
        jnp.array(positions),
    )


def without_nan(arguments):
    """The same with zeros where nothing may be read, for the plain definition."""
    return tuple(
        jnp.nan_to_num(x) if x is not None and jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in arguments
    )


def decode_shared(seed, batch, kv_heads, group, dim, slots, sharing, dtype=jnp.float32, empty=1):
    """A step of heads that follow a root: slots in order of position, as where nothing is dropped.
    The first sequence fills all but `empty` slots, the second has few tokens more than near ones,
    the third has ended. Returns the arguments, and which slots hold a token.
    """
    rng = np.random.default_rng(seed)
    length = np.array([slots - empty, sharing.near + 20, sharing.near + 30])[:batch]
    position = np.where(np.arange(batch) == 2, -1, length - 1)
    positions = np.where(np.arange(slots) < length[:, None], np.arange(slots), -1)
    positions = np.repeat(positions[:, None], kv_heads, 1).astype(np.int32)
    free = np.repeat(length[:, None] - (position >= 0)[:, None], kv_heads, 1).astype(np.int32)
    there = positions >= 0
    there_before = there & (np.arange(slots) != free[..., None])
    held = np.asarray(sharing.seated(jnp.array(length - 1, jnp.int32), sharing.near))
    ring = np.repeat(np.where(held < 0, slots, held)[:, None], kv_heads, 1).astype(np.int32)

    def normal(*shape):
        return jnp.array(rng.normal(size=shape), dtype)

    heads = (batch, kv_heads * group, dim)
    keys, values = normal(batch, kv_heads, slots, dim), normal(batch, kv_heads, dim, slots)
    # Of the root: little of the first heads' attention is distant, nearly all of the others'.
    far = jnp.broadcast_to(20.0 * jnp.arange(kv_heads)[None, :, None], (batch, kv_heads, group))
    # And of one query head among those that are read together.
    far = far.at[1, 0, -1].set(20.0)
    queries, far_queries = normal(*heads), normal(*heads)
    key, value = normal(batch, kv_heads, dim), normal(batch, kv_heads, dim)
    if sharing.skip and sharing.skip[0] == "predicted" and kv_heads > 1:
        # Or the new token has all of it.
        own = np.asarray(queries[0, -group:], np.float32)
        wanted = np.linalg.pinv(own) @ np.full(group, 30 * np.sqrt(dim))
        key = key.at[0, -1].set(wanted.astype(dtype))
    arguments = (
        queries,
        far_queries,
        key,
        value,
        normal(batch, kv_heads, sharing.near, dim),
        jnp.where(there_before[:, :, None], values, jnp.nan),
        jnp.where(there[..., None], keys, jnp.nan),
        jnp.array(positions),
        jnp.array(ring),
        jnp.array(free),
        jnp.array(position, jnp.int32),
        far,
    )
    return arguments, there


def in_any_order(arguments, there):
    """The same step, with tokens in other slots."""
    slots = there.shape[2]
    order = np.random.default_rng(1).permutation(slots)
    now = np.append(np.argsort(order), slots)
    *tokens, near, values, keys, positions, ring, free, position, far = arguments
    moved = (values[..., order], keys[:, :, order], positions[..., order], now[ring], now[free])
    return (*tokens, near, *map(jnp.asarray, moved), position, far), there[..., order]
