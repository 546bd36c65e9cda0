"""What predicts which far parts are skipped, on CPU: the root's keys pass by once."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.pallas_kernels import native
from jaxkv.pallas_kernels.decode import check_dtypes
from jaxkv.pallas_kernels.decode_cpu import parts_of
from jaxkv.shared import Sharing


def check(
    queries: Array,
    keys: Array,
    positions: Array,
    position: Array,
    *,
    sharing: Sharing,
    window: int | None,
) -> None:
    """Raises `NotImplementedError` for what `run` cannot serve."""
    del positions, position, sharing, window
    check_dtypes(queries=queries, keys=keys)
    if keys.dtype != jnp.float32:
        raise NotImplementedError(f"arrays must be float32, got {keys.dtype}")
    native.check()


def run(
    queries: Array,
    keys: Array,
    positions: Array,
    position: Array,
    *,
    sharing: Sharing,
    window: int | None,
) -> tuple[Array]:
    """See `far_lse`."""
    batch, kv_heads, slots, _ = keys.shape
    out = (batch, kv_heads, queries.shape[1] // kv_heads)
    found = native.call(
        "jaxkv_far_lse",
        jax.ShapeDtypeStruct(out, jnp.float32),
        *(queries, keys, positions, position),
        part=np.int64(parts_of(batch * kv_heads, slots)),
        window=np.int64(window or 0),
        sinks=np.int64(sharing.sinks),
        recent=np.int64(sharing.recent),
    )
    return (found,)
