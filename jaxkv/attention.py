"""Attention over the slots of a cache and over a block of new tokens.

Both give, beside the output, the statistics that a policy asks for (see `statistics`), in float32.
What a query may see is decided from stored positions, never from the order of slots, since slots
are not in order.

Einsum letters, here and everywhere: b batch, t new tokens, s slots (or all keys), h query heads,
k KV heads, g query heads per KV head, d head dim. Query head h reads KV head h // g.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.statistics import Rows, Statistic

_MASKED = -1e30
#: Rows of queries handled at once: few enough that their attention stays in the processor's cache.
_BLOCK_ROWS = 128
#: And no more than this many elements of attention per block, all sequences and heads together.
_BLOCK_ELEMENTS = 2**24
#: A causal block is cut into at most so many parts, each of which reads only the keys up to its
#: end, and a long one into twice as many. Each takes time to compile.
_CAUSAL_PARTS, _LONG = 4, 2048


class Far(NamedTuple):
    """What queries meet at a distance of `limit` or more: other keys, with queries for them.

    Under "ceiling" positions these are seen as if they were `limit` tokens away: queries are
    rotated to position `limit` and keys not at all. Where layers share keys they are another
    layer's.
    """

    queries: Float[Array, "batch kv_heads group t dim"]
    keys: Float[Array, "batch kv_heads keys dim"]
    limit: Int[Array, "batch kv_heads 1"]
    #: The first tokens of a text, which are never distant.
    sinks: int = 0

    def replace(
        self,
        logits: Array,
        queries: Array,
        query_positions: Array,
        key_positions: Array,
        near: slice,
    ) -> Float[Array, "batch kv_heads group rows keys"]:
        """`logits`, with those of distant keys in place of the exact ones."""
        distant = jnp.einsum(
            "bkgtd,bksd->bkgts", queries, self.keys[:, :, near], preferred_element_type=jnp.float32
        )
        distance = query_positions[:, None, :, None] - key_positions[:, :, None, near]
        there = distance >= self.limit[..., None]
        if self.sinks:
            there &= key_positions[:, :, None, near] >= self.sinks
        return jnp.where(there[:, :, None], distant, logits)


def visible(
    query_positions: Int[Array, "*#rows t"],
    key_positions: Int[Array, "*#rows s"],
    window: int | None,
) -> Bool[Array, "*rows t s"]:
    """Which stored tokens a query sees: non-empty, not later than itself, within the window."""
    queries, keys = query_positions[..., :, None], key_positions[..., None, :]
    seen = (keys >= 0) & (keys <= queries)
    return seen if window is None else seen & (queries - keys < window)


def attend_slots(
    queries: Float[Array, "batch heads dim"],
    keys: Float[Array, "batch rows slots dim"],
    values: Float[Array, "batch rows dim slots"],
    seen: Bool[Array, "batch kv_heads #group slots"],
    *,
    statistics: tuple[Statistic, ...] = (),
    query_positions: Int[Array, " batch"],
    key_positions: Int[Array, "batch kv_heads slots"],
    layer: Int[Array, ""],
) -> tuple[Float[Array, "batch heads dim"], tuple[Float[Array, "batch kv_heads slots"], ...]]:
    """One query per sequence over slots: a decode step.

    `rows` are the KV heads, or one pool that holds the slots of all KV heads: then all query heads
    meet all slots, and `seen` leaves each head its own.

    The cache is the left operand of both products: on CPU that is two to three times faster.
    """
    batch, heads, dim = queries.shape
    kv_heads, slots, rows = seen.shape[1], seen.shape[3], keys.shape[1]
    by_head = (batch, kv_heads, heads // kv_heads, slots)
    if rows != kv_heads:
        seen = jnp.broadcast_to(seen, by_head).reshape(batch, rows, -1, slots)
    grouped = queries.reshape(batch, rows, heads // rows, dim)
    logits = jnp.einsum("bksd,bkgd->bksg", keys, grouped, preferred_element_type=jnp.float32)
    # Slots last from here: what follows runs along them.
    logits = jnp.swapaxes(lax.optimization_barrier(logits), 2, 3)
    logits = jnp.where(seen, logits * dim**-0.5, _MASKED)
    highest = jnp.max(logits, 3)
    weights = lax.optimization_barrier(jnp.exp(logits - highest[..., None]))
    # A row that has ended sees nothing and gives nothing.
    share = jnp.where(highest > _MASKED, 1 / jnp.sum(weights, 3), 0.0)
    out = jnp.einsum(
        "bkds,bkgs->bkdg", values, weights.astype(values.dtype), preferred_element_type=jnp.float32
    )
    out = jnp.swapaxes(out * share[:, :, None, :], 2, 3).reshape(batch, heads, dim)
    found = Rows(
        logits=logits.reshape(by_head)[:, :, :, None],
        weights=weights.reshape(by_head)[:, :, :, None],
        share=share.reshape(by_head[:3])[..., None],
        query_positions=query_positions[:, None],
        key_positions=key_positions,
        layer=layer,
        newest=query_positions,
    )
    return out.astype(queries.dtype), tuple(statistic.of(found) for statistic in statistics)


def attend_block(
    queries: Float[Array, "batch kv_heads group t dim"],
    query_positions: Int[Array, "batch t"],
    keys: Float[Array, "batch kv_heads keys dim"],
    values: Float[Array, "batch kv_heads dim keys"],
    key_positions: Int[Array, "batch kv_heads keys"],
    *,
    window: int | None,
    statistics: tuple[Statistic, ...] = (),
    layer: Int[Array, ""],
    far: Far | None = None,
) -> tuple[
    Float[Array, "batch kv_heads group t dim"], tuple[Float[Array, "batch kv_heads keys"], ...]
]:
    """A block of queries over stored keys followed by the block's own keys.

    `keys` ends with the keys of the block itself, in the order of the queries; what stands before
    them is the content of the slots. Queries at position -1 are padding: their output means
    nothing and they give nothing to any statistic. Query head k * group + g reads KV head k.
    """
    batch, kv_heads, group, t, dim = queries.shape
    before = keys.shape[2] - t
    newest = jnp.max(query_positions, 1)
    rows = _rows_at_once(batch * kv_heads * group * keys.shape[2], t)
    parts = math.gcd(t // rows, _CAUSAL_PARTS if t <= _LONG else 2 * _CAUSAL_PARTS)
    received = tuple(jnp.zeros(key_positions.shape, jnp.float32) for _ in statistics)
    outs = []
    for start in range(0, t, t // parts):
        end = start + t // parts
        # Later keys of the block cannot be seen from this part: do not even read them.
        near = slice(None, before + end)

        def in_blocks(queries, start=start, end=end):
            blocks = queries[:, :, :, start:end].reshape(batch, kv_heads, group, -1, rows, dim)
            return jnp.moveaxis(blocks, 3, 0)

        blocks = in_blocks(queries)
        far_blocks = None if far is None else in_blocks(far.queries)
        block_positions = query_positions[:, start:end].reshape(batch, -1, rows)

        def attend(i, carry, near=near, far_blocks=far_blocks, block_positions=block_positions):
            received, blocks = carry
            q, positions = blocks[i], block_positions[:, i]
            seen = visible(positions[:, None], key_positions[..., near], window)
            bias = jnp.where(seen, 0.0, _MASKED)[:, :, None]
            logits = jnp.einsum(
                "bkgtd,bksd->bkgts", q, keys[:, :, near], preferred_element_type=jnp.float32
            )
            if far is not None:
                logits = far.replace(logits, far_blocks[i], positions, key_positions, near)
            # Barriers: one pass writes the product, one each reads it. Fused into each other, XLA
            # on CPU would compute exponentials several times; and the bias fused into the product,
            # which is then a third slower.
            product = lax.optimization_barrier(logits)
            logits = product * dim**-0.5 + bias
            highest = lax.optimization_barrier(jnp.max(logits, -1, keepdims=True))
            weights = lax.optimization_barrier(jnp.exp(logits - highest))
            share = 1 / jnp.sum(weights, -1)
            out = jnp.einsum(
                "bkgts,bkds->bkgtd",
                weights.astype(values.dtype),
                values[..., near],
                preferred_element_type=jnp.float32,
            )
            found = Rows(logits, weights, share, positions, key_positions[..., near], layer, newest)
            received = tuple(
                statistic.add(sums, near, found)
                for statistic, sums in zip(statistics, received, strict=True)
            )
            # Outputs take the place of their queries: a loop that collected them would start
            # from zeros, which XLA on CPU allocates for all layers before the first one runs.
            return received, blocks.at[i].set((out * share[..., None]).astype(q.dtype))

        received, blocks = lax.fori_loop(0, blocks.shape[0], attend, (received, blocks))
        outs.append(jnp.moveaxis(blocks, 0, 3).reshape(batch, kv_heads, group, -1, dim))
    return jnp.concatenate(outs, 3), received


def _rows_at_once(elements_per_row: int, t: int) -> int:
    """Rows of queries per block: a divisor of `t` that keeps a block within bounds."""
    wanted = max(1, min(_BLOCK_ROWS, _BLOCK_ELEMENTS // elements_per_row, t))
    return next(rows for rows in range(wanted, 0, -1) if t % rows == 0)
