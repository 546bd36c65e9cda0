"""`decode_shared` on TPU: the kernel of `decode` twice, over the ring of near keys and over the
root's keys, and the two merged by their log-sum-exp.

Values of the tokens in the ring are gathered for the first pass; they are few. A far part that is
skipped is not read: its blocks stay where they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxkv.pallas_kernels import decode_tpu
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
    """Raises `NotImplementedError` for what the kernels do not serve."""
    del rest
    if sharing.skip is not None and sharing.skip[0] != "predicted":
        raise NotImplementedError(
            f"skipping must be known before a block is read: 'predicted', got {sharing.skip[0]!r}"
        )
    decode_tpu.check(queries, key, value, near_keys, values, _ring_like(near_keys), window=window)
    decode_tpu.check(far_queries, key, value, keys, values, positions, window=window)


def _ring_like(near_keys: Array) -> Any:
    return jax.ShapeDtypeStruct(near_keys.shape[:3], jnp.int32)


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
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array | None]:
    """See `jaxkv.pallas_kernels.decode_shared`."""
    batch, kv_heads = near_keys.shape[:2]
    slots = values.shape[-1]
    # Else the compiler would gather for all layers at once, before the first one runs.
    values, key = lax.optimization_barrier((values, key))
    at = jnp.minimum(ring, slots - 1)
    held = jnp.where(ring < slots, jnp.take_along_axis(positions, at, 2), -1)
    seat = jnp.where(position < 0, 0, sharing.seats(position))
    seat = jnp.broadcast_to(seat[:, None], (batch, kv_heads)).astype(jnp.int32)
    # A sequence that has ended must leave its ring alone: it writes what is there.
    old = jnp.take_along_axis(near_keys, seat[..., None, None], 2)[:, :, 0]
    key = jnp.where((position < 0)[:, None, None], old, key)
    first = decode_tpu.attend(
        queries,
        key,
        value,
        near_keys,
        jnp.take_along_axis(values, at[:, :, None], 3),
        held,
        seat,
        position,
        window=window,
        lse=True,
        interpret=interpret,
    )
    distant = ~sharing.is_near(position[:, None, None], positions)
    active = counts = None
    if sharing.skip is not None:
        assert root_far is not None
        assert first.lse is not None
        seen = distant & (positions >= 0) & (positions <= position[:, None, None])
        if window is not None:
            seen &= position[:, None, None] - positions < window
        there = jnp.any(seen, -1)
        gate = jax.nn.sigmoid(first.lse - root_far)
        skip = jnp.all(gate >= sharing.skip[1], -1) & there
        active = (there & ~skip).astype(jnp.int32)
        counts = jnp.stack([skip, there], -1).astype(jnp.int32)
    second = decode_tpu.attend(
        far_queries,
        key,
        value,
        keys,
        values,
        jnp.where(distant, positions, -1),
        free,
        position,
        window=window,
        stored_key=True,
        lse=True,
        active=active,
        interpret=interpret,
    )
    assert first.lse is not None
    assert second.lse is not None
    # The published gate: the share of the near part.
    gate = jax.nn.sigmoid(first.lse - second.lse).reshape(batch, -1, 1)
    near_out, far_out = (part.out.astype(jnp.float32) for part in (first, second))
    out = gate * near_out + (1 - gate) * far_out
    return out.astype(queries.dtype), first.keys, second.values, counts
