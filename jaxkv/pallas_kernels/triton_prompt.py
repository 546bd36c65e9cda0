"""The kernels of `prompt_gpu`; `triton_decode` says what holds for both."""

import triton
import triton.language as tl

from jaxkv.pallas_kernels.triton_decode import finite, see


@triton.jit
def _attend(
    state,
    q,
    at,
    keys,
    values,
    key_positions,
    start,
    end,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    stride: tl.constexpr,
    block: tl.constexpr,
    scale: tl.constexpr,
    window: tl.constexpr,
    masked: tl.constexpr,
):
    """Some rows of queries over keys `start` up to `end`; `state` is their running softmax.

    Without `masked`, all the keys are there and all are seen.
    """
    top, sums, out = state
    d = tl.arange(0, padded_dim)
    for first in range(start, end, block):
        j = first + tl.arange(0, block)
        real = (j < end) | (not masked)
        k = tl.load(
            keys + j[:, None] * dim + d[None, :],
            mask=real[:, None] & (d < dim)[None, :],
            other=0.0,
        )
        logit = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        v = tl.load(
            values + d[:, None] * stride + j[None, :],
            mask=(d < dim)[:, None] & real[None, :],
            other=0.0,
        )
        if masked:
            held = tl.load(key_positions + j, mask=real, other=-1)
            seen = see(at[:, None], held[None, :], window)
            logit = tl.where(seen, logit, float("-inf"))
            # Empty slots may hold anything, also NaN, which no weight of 0 would remove.
            v = tl.where((held >= 0)[None, :], v, 0.0)
        new_top = tl.maximum(top, tl.max(logit, 1))
        shift = finite(new_top)
        weights = tl.exp2(logit - shift[:, None])
        shrink = tl.exp2(top - shift)
        sums = sums * shrink + tl.sum(weights, 1)
        out = tl.dot(
            weights.to(v.dtype), tl.trans(v), out * shrink[:, None], input_precision="ieee"
        )
        top = new_top
    return top, sums, out


@triton.jit
def prompt_attend(
    queries,  # [batch, kv_heads, group, t, dim]
    query_positions,  # [batch, t]
    keys,  # [batch, kv_heads, before + t, dim]
    values,  # [batch, kv_heads, dim, before + t]
    key_positions,  # [batch, kv_heads, before + t]
    out,  # [batch, kv_heads, group, t, dim]
    lse,  # float32 [batch, kv_heads, group, t]: log-sum-exp, base 2; inf for nothing seen
    scale: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    t: tl.constexpr,
    before: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    window: tl.constexpr,
):
    """Attention of a block of queries over stored keys and over their own.

    Grid: blocks of `rows` queries, batch * heads. `rows` is a multiple of `block`.
    """
    stride: tl.constexpr = before + t
    head = tl.program_id(1)
    kv_head = head // group
    # The longest first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * rows
    queries += head.to(tl.int64) * t * dim
    out += head.to(tl.int64) * t * dim
    keys += kv_head.to(tl.int64) * stride * dim
    values += kv_head.to(tl.int64) * stride * dim
    key_positions += kv_head * stride
    i = first + tl.arange(0, rows)
    d = tl.arange(0, padded_dim)
    at = tl.load(query_positions + head // (group * kv_heads) * t + i, mask=i < t, other=-1)
    inside = (i < t)[:, None] & (d < dim)[None, :]
    q = tl.load(queries + i[:, None] * dim + d[None, :], mask=inside, other=0.0)
    top = tl.full([rows], float("-inf"), tl.float32)
    sums = tl.zeros([rows], tl.float32)
    state = (top, sums, tl.zeros([rows, padded_dim], tl.float32))
    # Blocks of padding read nothing.
    live = tl.max(at, 0) >= 0
    if before:
        end = tl.where(live, before, 0)
        state = _attend(
            state, q, at, keys, values, key_positions, 0, end,
            dim, padded_dim, stride, block, scale, window, True,
        )  # fmt: skip
        keys += before * dim
        values += before
        key_positions += before
    # Of the block's own keys, those up to the first row are seen by all rows, later ones by none.
    end = tl.where(live, tl.minimum(first + rows, t), 0)
    start = 0
    if window:
        start = tl.maximum(first - window + 1, 0) // block * block
    else:
        start = tl.where(live, first, 0)
        state = _attend(
            state, q, at, keys, values, key_positions, 0, start,
            dim, padded_dim, stride, block, scale, window, False,
        )  # fmt: skip
    top, sums, result = _attend(
        state, q, at, keys, values, key_positions, start, end,
        dim, padded_dim, stride, block, scale, window, True,
    )  # fmt: skip
    seen = sums > 0
    result = result / tl.where(seen, sums, 1.0)[:, None]
    tl.store(out + i[:, None] * dim + d[None, :], result.to(out.dtype.element_ty), mask=inside)
    level = tl.where(seen, top + tl.log2(tl.where(seen, sums, 1.0)), float("inf"))
    tl.store(lse + head * t + i, level, mask=i < t)


@triton.jit
def _shares(
    k,
    held,
    queries,
    lse,
    query_positions,
    i,
    oldest,
    t: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    scale: tl.constexpr,
    power: tl.constexpr,
    window: tl.constexpr,
    masked: tl.constexpr,
):
    """Probabilities, to a power, of rows `i` of one query head, as [keys, rows]."""
    d = tl.arange(0, padded_dim)
    q = tl.load(
        queries + i[:, None] * dim + d[None, :],
        mask=(i < t)[:, None] & (d < dim)[None, :],
        other=0.0,
    )
    at = tl.load(query_positions + i, mask=i < t, other=-1)
    level = tl.load(lse + i, mask=i < t, other=float("inf"))
    # Padding and rows that do not count give exp2(-inf).
    level = tl.where(at >= oldest, level, float("inf"))
    logit = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
    shares = tl.exp2((logit - level[None, :]) * power)
    if masked:
        shares = tl.where(see(at[None, :], held[:, None], window), shares, 0.0)
    return shares


@triton.jit
def _collect(
    received,
    k,
    held,
    queries,
    lse,
    query_positions,
    start,
    end,
    oldest,
    group: tl.constexpr,
    t: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rows: tl.constexpr,
    scale: tl.constexpr,
    power: tl.constexpr,
    largest: tl.constexpr,
    window: tl.constexpr,
    masked: tl.constexpr,
):
    """Adds the shares of rows `start` up to `end` to `received`, [keys, rows]."""
    if largest:
        for first in range(start, end, rows):
            i = first + tl.arange(0, rows)
            highest = tl.zeros_like(received)
            for g in range(group):
                shares = _shares(
                    k, held, queries + g * t * dim, lse + g * t, query_positions, i, oldest,
                    t, dim, padded_dim, scale, power, window, masked,
                )  # fmt: skip
                highest = tl.maximum(highest, shares)
            received += highest
    else:
        for g in range(group):
            for first in range(start, end, rows):
                i = first + tl.arange(0, rows)
                received += _shares(
                    k, held, queries + g * t * dim, lse + g * t, query_positions, i, oldest,
                    t, dim, padded_dim, scale, power, window, masked,
                )  # fmt: skip
    return received


@triton.jit
def prompt_collect(
    queries,  # [batch, kv_heads, group, t, dim]
    query_positions,  # [batch, t]
    newest,  # [batch]: the last of query_positions
    keys,  # [batch, kv_heads, before + t, dim]
    key_positions,  # [batch, kv_heads, before + t]
    lse,  # float32 [batch, kv_heads, group, t], from prompt_attend
    received,  # float32 [batch, kv_heads, before + t]
    scale: tl.constexpr,
    power: tl.constexpr,
    reduction: tl.constexpr,
    last: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    t: tl.constexpr,
    before: tl.constexpr,
    block: tl.constexpr,
    window: tl.constexpr,
):
    """What keys received of the attention that `prompt_attend` computed.

    Grid: blocks of `block` stored keys, then of the block's own; batch * kv_heads. `last` 0 is all.
    """
    stored_blocks: tl.constexpr = (before + block - 1) // block
    largest: tl.constexpr = reduction == "max" and group > 1
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = kv_head // kv_heads
    stored = tile < stored_blocks
    # The first key, among the stored ones or among the block's own.
    first = tl.where(stored, tile, tile - stored_blocks) * block
    offset = tl.where(stored, 0, before)
    limit = tl.where(stored, before, t)
    queries += kv_head.to(tl.int64) * group * t * dim
    keys += (kv_head.to(tl.int64) * (before + t) + offset) * dim
    lse += kv_head * group * t
    query_positions += sequence * t
    j = first + tl.arange(0, block)
    d = tl.arange(0, padded_dim)
    k = tl.load(
        keys + j[:, None] * dim + d[None, :],
        mask=(j < limit)[:, None] & (d < dim)[None, :],
        other=0.0,
    )
    here = kv_head * (before + t) + offset + j
    held = tl.load(key_positions + here, mask=j < limit, other=-1)
    # Positions of the block are consecutive, and padding follows: so many rows are real.
    newest_position = tl.load(newest + sequence)
    real = newest_position + 1 - tl.load(query_positions)
    end = tl.where(newest_position < 0, 0, real)
    start = tl.where(stored, 0, first)
    # All later rows of the block see all of these keys; if there is padding among these keys, no
    # later row is real.
    masked_end = tl.where(stored, end, tl.minimum(end, first + block))
    oldest = 0
    if last:
        oldest = tl.maximum(newest_position - last + 1, 0)
        start = tl.maximum(start, (real - last) // block * block)
    if window:
        end = tl.where(stored, end, tl.minimum(end, first + block + window))
        masked_end = end
    sums = tl.zeros([block, block], tl.float32)
    sums = _collect(
        sums, k, held, queries, lse, query_positions, start, masked_end, oldest,
        group, t, dim, padded_dim, block, scale, power, largest, window, True,
    )  # fmt: skip
    sums = _collect(
        sums, k, held, queries, lse, query_positions, tl.maximum(start, masked_end), end, oldest,
        group, t, dim, padded_dim, block, scale, power, largest, window, False,
    )  # fmt: skip
    result = tl.sum(sums, 1)
    if reduction == "mean":
        result = result / group
    tl.store(received + here, result, mask=j < limit)
