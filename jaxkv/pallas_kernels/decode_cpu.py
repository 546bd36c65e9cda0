"""A decode step on CPU: keys and values pass by once, by all cores.

Slots of a KV head are cut into parts (split-K, as in flash decoding), so that few heads keep many
cores busy; the parts are put together at the end, when every slot's share of attention is known.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.pallas_kernels import native
from jaxkv.pallas_kernels.decode import column_sums
from jaxkv.pallas_kernels.dispatch import check_dtypes
from jaxkv.shared import Sharing
from jaxkv.statistics import Statistic

#: Slots of a part, at most and at least. Long rows are read faster.
_LONGEST, _SHORTEST = 1024, 128
#: Parts for each core, so that all end at about the same time.
_PARTS_PER_CORE = 4


def check(
    queries: Array,
    key: Array,
    value: Array,
    keys: Array,
    values: Array,
    positions: Array,
    *rest: Any,
    statistics: tuple[Statistic, ...] = (),
    window: int | None = None,
    far: Sharing | None = None,
) -> None:
    """Raises `NotImplementedError` for what `run` cannot serve."""
    del rest, window, far
    check_dtypes(queries=queries, key=key, value=value, keys=keys, values=values)
    if keys.dtype != jnp.float32:
        raise NotImplementedError(f"arrays must be float32, got {keys.dtype}")
    native.check_sums(column_sums(statistics))
    kv_heads, rows = positions.shape[1], keys.shape[1]
    if rows != kv_heads:
        raise NotImplementedError(f"each KV head must have its own slots, got {rows} rows of slots")
    native.check()


def run(
    queries: Array,
    key: Array,
    value: Array,
    keys: Array,
    values: Array,
    positions: Array,
    free: Array,
    position: Array,
    onto: Array | None,
    layer: Array,
    *,
    statistics: tuple[Statistic, ...] = (),
    window: int | None = None,
    far: Sharing | None = None,
) -> tuple[Array, Array, Array, tuple[Array, ...], Array | None]:
    """See `decode`. Keys and values are changed in place."""
    del layer
    batch, kv_heads, slots, dim = keys.shape
    heads = queries.shape[1]
    statistic = column_sums(statistics)
    part = parts_of(batch * kv_heads, slots)

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    out, keys, values, received, told, *_ = native.call(
        "jaxkv_decode",
        (
            floats(*queries.shape),
            floats(*keys.shape),
            floats(*values.shape),
            floats(0) if statistic is None else floats(batch, kv_heads, slots),
            floats(0) if far is None else floats(batch, kv_heads, heads // kv_heads),
            floats(batch, heads, slots),
            floats(batch, heads, -(-slots // part), 2 + dim),
        ),
        *(queries, key, value, keys, values, positions, free, position),
        jnp.zeros(0, jnp.float32) if onto is None or statistic is None else onto,
        input_output_aliases={3: 1, 4: 2},
        part=np.int64(part),
        window=np.int64(window or 0),
        sinks=np.int64(0 if far is None else far.sinks),
        recent=np.int64(0 if far is None else far.recent),
        **native.sums(statistic),
    )
    received = () if statistic is None else (received,)
    return out, keys, values, received, None if far is None else told


def parts_of(rows: int, slots: int) -> int:
    """Slots of a part."""
    wanted = -(-_PARTS_PER_CORE * (os.cpu_count() or 1) // rows)
    return min(max(-(-slots // wanted), _SHORTEST), _LONGEST)
