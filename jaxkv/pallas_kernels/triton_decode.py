"""The kernels of `decode_gpu`, in Triton and nothing else: they know no JAX, so that Triton's
interpreter and compiler can be asked about them on any machine. So are those of `triton_prompt` and
`triton_shared`.

Arrays are contiguous. Every size is a compile-time constant, as in the program around them. Where
a size is no power of two, as Triton wants them, the next one is used and the rest is masked. The
names `padded_dim` and `padded_group` are these; elsewhere names are those of the plain versions.

Exponentials are powers of two: logits are multiplied by log2(e) beside the scale, as `scale`.
"""

import triton
import triton.language as tl


@triton.jit
def see(query_positions, key_positions, window: tl.constexpr):
    """`jaxkv.attention.visible`; `window` 0 is none."""
    seen = (key_positions >= 0) & (key_positions <= query_positions)
    if window:
        seen = seen & (query_positions - key_positions < window)
    return seen


@triton.jit
def finite(highest):
    """A maximum to subtract, also where nothing was seen."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def absorb(logit, v, seen, top, sums, out):
    """Adds a block of slots to a softmax: its highest logit, its sum, and the weighed values.

    `logit` is [block, group], -inf where not `seen`, `v` [dim, block], `out` [dim, group].
    """
    new_top = tl.maximum(top, tl.max(logit, 0))
    shift = finite(new_top)
    weights = tl.exp2(logit - shift[None, :])
    shrink = tl.exp2(top - shift)
    sums = sums * shrink + tl.sum(weights, 0)
    # Empty slots may hold anything, also NaN, which no weight of 0 would remove.
    v = tl.where(seen[None, :], v, 0.0)
    out = tl.dot(v, weights.to(v.dtype), out * shrink[None, :], input_precision="ieee")
    return new_top, sums, out


@triton.jit
def decode_split(
    queries,  # [batch, kv_heads, group, dim]
    key,  # [batch, kv_heads, dim]
    value,  # [batch, kv_heads, dim]
    keys,  # [batch, kv_heads, slots, dim]
    values,  # [batch, kv_heads, dim, slots]
    positions,  # [batch, kv_heads, slots]
    free,  # [batch, kv_heads]
    position,  # [batch]
    keys_out,  # the bytes of keys
    values_out,  # the bytes of values
    partial,  # float32 [batch, kv_heads, splits, group, dim]
    highest,  # float32 [batch, kv_heads, splits, group]
    total,  # float32 [batch, kv_heads, splits, group]
    logits,  # float32 [batch, kv_heads, slots, group]; -inf where nothing is seen
    scale: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    slots: tl.constexpr,
    splits: tl.constexpr,
    split: tl.constexpr,
    block: tl.constexpr,
    window: tl.constexpr,
    keep_logits: tl.constexpr,
):
    """One query per sequence over one part of the slots of a KV head.

    Grid: batch * kv_heads, splits. A part is `split` slots, a multiple of `block`. Slots are the
    rows of every product, so that the cache fills tensor cores, not the few queries.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    # Offsets within a KV head fit into 32 bits, those of the whole cache may not.
    wide = row.to(tl.int64)
    keys += wide * slots * dim
    values += wide * slots * dim
    logits += wide * slots * group
    at = tl.load(position + row // kv_heads)
    own = tl.load(free + row)
    d = tl.arange(0, padded_dim)
    g = tl.arange(0, padded_group)
    s = tl.arange(0, block)
    d_real, g_real = d < dim, g < group
    q = tl.load(
        queries + (row * group + g[None, :]) * dim + d[:, None],
        mask=d_real[:, None] & g_real[None, :],
        other=0.0,
    )
    new_key = tl.load(key + row * dim + d, mask=d_real, other=0.0)
    new_value = tl.load(value + row * dim + d, mask=d_real, other=0.0)
    first = part * split
    end = tl.minimum(first + split, slots)
    # The part that the new token falls into begins with it, and passes over its slot.
    mine = (own >= first) & (own < end)
    met = mine & (at >= 0)
    new_logit = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[:, None], 0) * scale
    new_logit = tl.where(met, new_logit, float("-inf"))
    top = new_logit
    sums = tl.where(met, tl.full([padded_group], 1.0, tl.float32), 0.0)
    out = tl.where(met & g_real[None, :], new_value.to(tl.float32)[:, None], 0.0)
    for start in range(first, end, block):
        slot = start + s
        real = slot < slots
        held = tl.load(positions + row * slots + slot, mask=real, other=-1)
        seen = see(at, held, window) & (slot != own)
        k = tl.load(
            keys + slot[:, None] * dim + d[None, :],
            mask=real[:, None] & d_real[None, :],
            other=0.0,
        )
        logit = tl.dot(k, q, input_precision="ieee") * scale
        # Empty slots may hold anything, also NaN, which no weight of 0 would remove.
        logit = tl.where(seen[:, None], logit, float("-inf"))
        if keep_logits:
            tl.store(
                logits + slot[:, None] * group + g[None, :],
                tl.where((slot == own)[:, None], new_logit[None, :], logit),
                mask=real[:, None] & g_real[None, :],
            )
        v = tl.load(
            values + d[:, None] * slots + slot[None, :],
            mask=d_real[:, None] & real[None, :],
            other=0.0,
        )
        top, sums, out = absorb(logit, v, seen, top, sums, out)
    if mine:
        # After the loop; no other program reads this slot.
        tl.store(keys_out + wide * slots * dim + own * dim + d, new_key, mask=d_real)
        tl.store(values_out + wide * slots * dim + d * slots + own, new_value, mask=d_real)
    here = (row * splits + part) * group + g
    tl.store(highest + here, top, mask=g_real)
    tl.store(total + here, sums, mask=g_real)
    tl.store(
        partial + here[None, :] * dim + d[:, None], out, mask=d_real[:, None] & g_real[None, :]
    )


@triton.jit
def decode_join(
    partial,  # float32 [batch, kv_heads, splits, group, dim]
    highest,  # float32 [batch, kv_heads, splits, group]
    total,  # float32 [batch, kv_heads, splits, group]
    logits,  # float32 [batch, kv_heads, slots, group]
    onto,  # float32 [batch, kv_heads, slots]
    out,  # [batch, kv_heads, group, dim]
    received,  # float32 [batch, kv_heads, slots]; the bytes of onto, if that is added
    power: tl.constexpr,
    reduction: tl.constexpr,
    add: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    slots: tl.constexpr,
    splits: tl.constexpr,
    padded_splits: tl.constexpr,
    block: tl.constexpr,
):
    """Puts the parts of `decode_split` together, and adds up what slots received.

    Grid: batch * kv_heads, then one program for each query head of the group and one for every
    `block` slots, if attention is collected. `add`: it goes onto `onto`.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    s = tl.arange(0, padded_splits)
    partial += row.to(tl.int64) * splits * group * dim
    highest += row * splits * group
    total += row * splits * group
    if part < group:
        tops = tl.load(highest + s * group + part, mask=s < splits, other=float("-inf"))
        sums = tl.load(total + s * group + part, mask=s < splits, other=0.0)
        top = finite(tl.max(tops, 0))
        whole = tl.sum(sums * tl.exp2(tops - top), 0)
        d = tl.arange(0, padded_dim)
        result = tl.zeros([padded_dim], tl.float32)
        for first in range(0, splits, 16):
            some = first + tl.arange(0, 16)
            here = some * group + part
            weights = tl.exp2(tl.load(highest + here, mask=some < splits, other=-1e38) - top)
            outs = tl.load(
                partial + here[:, None] * dim + d[None, :],
                mask=(some < splits)[:, None] & (d < dim)[None, :],
                other=0.0,
            )
            result += tl.sum(outs * weights[:, None], 0)
        # A sequence that has ended sees nothing and gives nothing.
        result = result / tl.where(whole > 0, whole, 1.0)
        tl.store(
            out + (row * group + part) * dim + d, result.to(out.dtype.element_ty), mask=d < dim
        )
    else:
        g = tl.arange(0, padded_group)
        each = s[:, None] * group + g[None, :]
        real = (s < splits)[:, None] & (g < group)[None, :]
        all_tops = tl.load(highest + each, mask=real, other=float("-inf"))
        all_sums = tl.load(total + each, mask=real, other=0.0)
        level = finite(tl.max(all_tops, 0))
        all_sums = tl.sum(all_sums * tl.exp2(all_tops - level[None, :]), 0)
        level += tl.log2(tl.where(all_sums > 0, all_sums, 1.0))
        slot = (part - group) * block + tl.arange(0, block)
        logit = tl.load(
            logits + row.to(tl.int64) * slots * group + slot[:, None] * group + g[None, :],
            mask=(slot < slots)[:, None] & (g < group)[None, :],
            other=float("-inf"),
        )
        shares = tl.exp2((logit - level[None, :]) * power)
        gained = tl.max(shares, 1) if reduction == "max" else tl.sum(shares, 1)
        if reduction == "mean":
            gained = gained / group
        if add:
            gained += tl.load(onto + row * slots + slot, mask=slot < slots)
        tl.store(received + row * slots + slot, gained, mask=slot < slots)
