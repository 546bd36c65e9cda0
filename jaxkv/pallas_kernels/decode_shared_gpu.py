"""`decode_shared` on NVIDIA GPUs, by Triton: as `decode_gpu`, in two passes over parts of the ring
and of the slots. One small kernel puts all parts together: they are parts of one softmax.

What is skipped is known between the passes, from the log-sum-exp of the first.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxkv.attention import visible
from jaxkv.pallas_kernels import decode_gpu
from jaxkv.pallas_kernels.decode_gpu import LOG2_E, call, power_of_two
from jaxkv.pallas_kernels.triton_decode import decode_join
from jaxkv.pallas_kernels.triton_shared import shared_far, shared_near
from jaxkv.shared import Sharing


def check(
    queries: Array,
    far_queries: Array,
    key: Array,
    value: Array,
    near_keys: Array,
    values: Array,
    keys: Array,
    positions: Array,
    *rest: Any,
    sharing: Sharing,
    window: int | None = None,
) -> None:
    """Raises `NotImplementedError` for what `run` cannot serve."""
    del rest
    if sharing.skip is not None and sharing.skip[0] != "predicted":
        raise NotImplementedError(
            f"skipping must be known before a block is read: 'predicted', got {sharing.skip[0]!r}"
        )
    decode_gpu.check(queries, key, value, near_keys, values, positions, window=window)
    decode_gpu.check(far_queries, key, value, keys, values, positions, window=window)


def run(
    queries: Array,
    far_queries: Array,
    key: Array,
    value: Array,
    near_keys: Array,
    values: Array,
    keys: Array,
    positions: Array,
    ring: Array,
    free: Array,
    position: Array,
    root_far: Array | None,
    *,
    sharing: Sharing,
    window: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array | None]:
    """See `decode_shared`. Near keys and values are changed in place.

    Raises:
      ValueError: `interpret` is asked for: Triton's interpreter cannot be called from JAX.

    """
    decode_gpu.refuse_interpreter(interpret)
    batch, kv_heads, slots, dim = keys.shape
    near, heads = near_keys.shape[2], queries.shape[1]
    group = heads // kv_heads
    sizes: dict[str, Any] = {
        "group": group,
        "padded_group": power_of_two(group),
        "dim": dim,
        "padded_dim": power_of_two(dim, 16),
        "slots": slots,
    }
    shared: dict[str, Any] = {
        **sizes,
        "kv_heads": kv_heads,
        "scale": dim**-0.5 * LOG2_E,
        "window": window or 0,
        "num_warps": 4,
        "num_stages": 3,
    }

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def parts(count: int) -> tuple[dict[str, Any], tuple[jax.ShapeDtypeStruct, ...]]:
        """How so many keys are cut into parts, and what these leave."""
        splits, split, block = decode_gpu.parts_of(keys, batch * kv_heads, count)
        cut = {"splits": splits, "split": split, "block": block, "grid": (batch * kv_heads, splits)}
        left = (batch, kv_heads, splits, group)
        return cut, (floats(*left, dim), floats(*left), floats(*left))

    cut, left = parts(near)
    near_keys, *first = call(
        shared_near,
        *(queries, key, value, near_keys, values, positions, ring),
        sharing.seats(position).astype(jnp.int32),
        position,
        out_shape=(jax.ShapeDtypeStruct(near_keys.shape, near_keys.dtype), *left),
        input_output_aliases={3: 0},
        **cut,
        **shared,
        near=near,
    )
    active, counts = jnp.ones((batch, kv_heads), jnp.int32), None
    if sharing.skip is not None:
        assert root_far is not None
        counts = _skipped(first[1], first[2], root_far, positions, position, sharing, window)
        active = counts[..., 1] - counts[..., 0]
    # The second pass writes where the first reads.
    values, first = lax.optimization_barrier((values, first))
    cut, left = parts(slots)
    values, *second = call(
        shared_far,
        *(far_queries, value, keys, values, positions, free, position, active),
        out_shape=(jax.ShapeDtypeStruct(values.shape, values.dtype), *left),
        input_output_aliases={3: 0},
        **cut,
        **shared,
        sinks=sharing.sinks,
        recent=sharing.recent,
    )
    partial, highest, total = (jnp.concatenate(both, 2) for both in zip(first, second, strict=True))
    splits = total.shape[2]
    out, _ = call(
        decode_join,
        *(partial, highest, total, total, total),
        out_shape=(jax.ShapeDtypeStruct(queries.shape, queries.dtype), floats(1)),
        grid=(batch * kv_heads, group),
        num_warps=4,
        num_stages=2,
        **sizes,
        splits=splits,
        padded_splits=power_of_two(splits),
        block=16,
        power=1.0,
        reduction="sum",
        add=False,
    )
    return out, near_keys, values, counts


def _skipped(highest, total, root_far, positions, position, sharing, window):
    """Per KV head: whether its distant part is skipped, and whether there is one."""
    top = jnp.max(highest, 2)
    shift = jnp.where(jnp.isfinite(top), top, 0.0)
    sums = jnp.sum(total * jnp.exp2(highest - shift[:, :, None]), 2)
    near_lse = (shift + jnp.log2(sums)) * math.log(2)
    seen = visible(position[:, None, None], positions, window)[:, :, 0]
    there = jnp.any(seen & ~sharing.is_near(position[:, None, None], positions), -1)
    gate = jax.nn.sigmoid(near_lse - root_far)
    skip = jnp.all(gate >= sharing.skip[1], -1) & there
    return jnp.stack([skip, there], -1).astype(jnp.int32)
