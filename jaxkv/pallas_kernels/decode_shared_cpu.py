"""A decode step of heads that share keys, on CPU: what `decode_cpu` does, with the logits of near
tokens in the places of the root's, and without what is skipped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.pallas_kernels import native
from jaxkv.pallas_kernels.decode import check_dtypes
from jaxkv.pallas_kernels.decode_cpu import parts_of
from jaxkv.shared import Sharing

_SKIP = {None: 0, "exact": 1, "predicted": 2}


def check(
    queries: Array,
    far_queries: Array,
    key: Array,
    value: Array,
    near_keys: Array,
    values: Array,
    keys: Array,
    *rest: Any,
    sharing: Sharing,
    window: int | None = None,
) -> None:
    """Raises `NotImplementedError` for what `run` cannot serve."""
    del far_queries, key, value, rest, sharing, window
    check_dtypes(queries=queries, near_keys=near_keys, values=values, keys=keys)
    if keys.dtype != jnp.float32:
        raise NotImplementedError(f"arrays must be float32, got {keys.dtype}")
    native.check()


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
) -> tuple[Array, Array, Array, Array | None]:
    """See `decode_shared`. Near keys and values are changed in place."""
    batch, kv_heads, slots, dim = keys.shape
    heads, near = queries.shape[1], near_keys.shape[2]
    form, tau = (None, 1.0) if sharing.skip is None else sharing.skip
    part = parts_of(batch * kv_heads, slots)

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    out, near_keys, values, counts, *_ = native.call(
        "jaxkv_decode_shared",
        (
            array(*queries.shape),
            array(*near_keys.shape),
            array(*values.shape),
            array(batch, kv_heads, 2, dtype=jnp.int32),
            array(batch, heads, slots),
            array(batch, heads, near),
            array(batch, heads, -(-slots // part), 2 + dim),
        ),
        *(
            queries,
            far_queries,
            key,
            value,
            near_keys,
            values,
            keys,
            positions,
            ring,
            free,
            position,
        ),
        jnp.zeros(0, jnp.float32) if root_far is None else root_far,
        input_output_aliases={4: 1, 5: 2},
        part=np.int64(part),
        window=np.int64(window or 0),
        sinks=np.int64(sharing.sinks),
        recent=np.int64(sharing.recent),
        skip=np.int64(_SKIP[form]),
        tau=np.float32(tau),
    )
    return out, near_keys, values, None if form is None else counts
