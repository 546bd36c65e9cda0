"""The kernels of `decode_shared_gpu`, in Triton and nothing else; see `triton_decode`."""

import triton
import triton.language as tl

from jaxkv.pallas_kernels.triton_decode import absorb, see


@triton.jit
def shared_near(
    queries,  # [batch, kv_heads, group, dim]
    key,  # [batch, kv_heads, dim]
    value,  # [batch, kv_heads, dim]
    near_keys,  # [batch, kv_heads, near, dim]
    values,  # [batch, kv_heads, dim, slots]
    positions,  # [batch, kv_heads, slots]
    ring,  # [batch, kv_heads, near]: slots
    seat,  # [batch]: the place of the new token in the ring, -1 of who has ended
    position,  # [batch]
    near_out,  # the bytes of near_keys
    partial,  # float32 [batch, kv_heads, splits, group, dim]
    highest,  # float32 [batch, kv_heads, splits, group]
    total,  # float32 [batch, kv_heads, splits, group]
    scale: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    slots: tl.constexpr,
    near: tl.constexpr,
    splits: tl.constexpr,
    split: tl.constexpr,
    block: tl.constexpr,
    window: tl.constexpr,
):
    """One query per sequence over one part of the ring of a KV head.

    Grid: batch * kv_heads, splits. A part is `split` places, a multiple of `block`.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    # Offsets within a KV head fit into 32 bits, those of the whole cache may not.
    wide = row.to(tl.int64)
    near_keys += wide * near * dim
    values += wide * slots * dim
    at = tl.load(position + row // kv_heads)
    own = tl.load(seat + row // kv_heads)
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
    end = tl.minimum(first + split, near)
    # The part that the new token falls into begins with it, and passes over its place.
    met = (own >= first) & (own < end)
    new_logit = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[:, None], 0) * scale
    top = tl.where(met, new_logit, float("-inf"))
    sums = tl.where(met, tl.full([padded_group], 1.0, tl.float32), 0.0)
    out = tl.where(met & g_real[None, :], new_value.to(tl.float32)[:, None], 0.0)
    for start in range(first, end, block):
        place = start + s
        slot = tl.load(ring + row * near + place, mask=place < near, other=slots)
        stored = slot < slots
        held = tl.load(positions + row * slots + slot, mask=stored, other=-1)
        seen = see(at, held, window) & (place != own)
        k = tl.load(
            near_keys + place[:, None] * dim + d[None, :],
            mask=stored[:, None] & d_real[None, :],
            other=0.0,
        )
        logit = tl.dot(k, q, input_precision="ieee") * scale
        logit = tl.where(seen[:, None], logit, float("-inf"))
        v = tl.load(
            values + d[:, None] * slots + slot[None, :],
            mask=d_real[:, None] & stored[None, :],
            other=0.0,
        )
        top, sums, out = absorb(logit, v, seen, top, sums, out)
    if met:
        # After the loop; no other program reads this place.
        tl.store(near_out + (wide * near + own) * dim + d, new_key, mask=d_real)
    here = (row * splits + part) * group + g
    tl.store(highest + here, top, mask=g_real)
    tl.store(total + here, sums, mask=g_real)
    tl.store(
        partial + here[None, :] * dim + d[:, None], out, mask=d_real[:, None] & g_real[None, :]
    )


@triton.jit
def shared_far(
    queries,  # [batch, kv_heads, group, dim]
    value,  # [batch, kv_heads, dim]
    keys,  # [batch, kv_heads, slots, dim]: of the root
    values,  # [batch, kv_heads, dim, slots]
    positions,  # [batch, kv_heads, slots]
    free,  # [batch, kv_heads]
    position,  # [batch]
    active,  # [batch, kv_heads]: whether slots are read
    values_out,  # the bytes of values
    partial,  # float32 [batch, kv_heads, splits, group, dim]
    highest,  # float32 [batch, kv_heads, splits, group]
    total,  # float32 [batch, kv_heads, splits, group]
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
    sinks: tl.constexpr,
    recent: tl.constexpr,
):
    """The same over the distant tokens among one part of the slots of a KV head.

    Grid: batch * kv_heads, splits. A part is `split` slots, a multiple of `block`.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    wide = row.to(tl.int64)
    keys += wide * slots * dim
    values += wide * slots * dim
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
    first = part * split
    end = tl.minimum(first + split, slots)
    top = tl.full([padded_group], float("-inf"), tl.float32)
    sums = tl.zeros([padded_group], tl.float32)
    out = tl.zeros([padded_dim, padded_group], tl.float32)
    # What is skipped is not read.
    read = tl.where(tl.load(active + row) != 0, end, first)
    for start in range(first, read, block):
        slot = start + s
        real = slot < slots
        held = tl.load(positions + row * slots + slot, mask=real, other=-1)
        seen = see(at, held, window) & (held >= sinks) & (at - held >= recent)
        k = tl.load(
            keys + slot[:, None] * dim + d[None, :],
            mask=real[:, None] & d_real[None, :],
            other=0.0,
        )
        logit = tl.dot(k, q, input_precision="ieee") * scale
        logit = tl.where(seen[:, None], logit, float("-inf"))
        v = tl.load(
            values + d[:, None] * slots + slot[None, :],
            mask=d_real[:, None] & real[None, :],
            other=0.0,
        )
        top, sums, out = absorb(logit, v, seen, top, sums, out)
    if (own >= first) & (own < end):
        # The new token is near: it is stored, and not met.
        new_value = tl.load(value + row * dim + d, mask=d_real, other=0.0)
        tl.store(values_out + wide * slots * dim + d * slots + own, new_value, mask=d_real)
    here = (row * splits + part) * group + g
    tl.store(highest + here, top, mask=g_real)
    tl.store(total + here, sums, mask=g_real)
    tl.store(
        partial + here[None, :] * dim + d[:, None], out, mask=d_real[:, None] & g_real[None, :]
    )
