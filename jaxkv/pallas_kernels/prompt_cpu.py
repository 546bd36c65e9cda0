"""Attention of a block of new tokens on CPU: a few rows at a time, whose logits never leave the
cache of a core.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.attention import Far, attend_block
from jaxkv.pallas_kernels import native
from jaxkv.pallas_kernels.decode import column_sums
from jaxkv.pallas_kernels.dispatch import check_dtypes
from jaxkv.statistics import Statistic

#: Parts that the rows of a KV head are cut into: work for as many cores.
_PARTS = 32
#: What panels of keys and values are wide at most, in floats.
_PANEL = 32


def check(
    queries: Array,
    query_positions: Array,
    keys: Array,
    values: Array,
    key_positions: Array,
    *,
    window: int | None,
    statistics: tuple[Statistic, ...] = (),
    layer: Any,
    far: Far | None = None,
) -> None:
    """Raises `NotImplementedError` for what `run` cannot serve."""
    del query_positions, key_positions, window, layer
    check_dtypes(queries=queries, keys=keys, values=values)
    if keys.dtype != jnp.float32:
        raise NotImplementedError(f"arrays must be float32, got {keys.dtype}")
    if far is not None and not jax.sharding.get_abstract_mesh().empty:
        raise NotImplementedError("distant keys on a mesh are met by XLA")
    native.check_sums(column_sums(statistics))
    native.check()


def run(
    queries: Array,
    query_positions: Array,
    keys: Array,
    values: Array,
    key_positions: Array,
    *,
    window: int | None,
    statistics: tuple[Statistic, ...] = (),
    layer: Array,
    far: Far | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """See `jaxkv.attention.attend_block`."""
    options: Any = {"window": window, "statistics": statistics}
    sinks = 0 if far is None else far.sinks

    def given(*distant: Array) -> Far | None:
        if not distant:
            return None
        queries, keys, limit = distant
        return Far(queries, keys, limit, sinks)

    def attend(*arrays: Array) -> tuple[Array, tuple[Array, ...]]:
        return _attend(*arrays[:5], **options, far=given(*arrays[5:]))

    def plain(*arrays: Array) -> tuple[Array, tuple[Array, ...]]:
        return attend_block(*arrays[:5], **options, layer=layer, far=given(*arrays[5:]))

    arrays = (queries, query_positions, keys, values, key_positions)
    distant = () if far is None else (far.queries, far.keys, far.limit)
    return native.differentiable(attend, plain, *arrays, *distant)


def _attend(
    queries: Array,
    query_positions: Array,
    keys: Array,
    values: Array,
    key_positions: Array,
    *,
    window: int | None,
    statistics: tuple[Statistic, ...],
    far: Far | None,
) -> tuple[Array, tuple[Array, ...]]:
    batch, kv_heads, _, t, dim = queries.shape
    count = keys.shape[2]
    statistic = column_sums(statistics)

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    padded = math.ceil(count / _PANEL) * _PANEL
    packed = padded * ((1 if far is None else 2) * dim + math.ceil(dim / _PANEL) * _PANEL)
    parts = min(_PARTS, t)
    out, received, *_ = native.call(
        "jaxkv_prompt",
        (
            floats(*queries.shape),
            floats(0) if statistic is None else floats(batch, kv_heads, count),
            floats(batch, kv_heads, packed),
            floats(batch, kv_heads, parts, 0 if statistic is None else count),
        ),
        *(queries, query_positions, keys, values, key_positions),
        *_far(far, batch, kv_heads),
        window=np.int64(window or 0),
        last=np.int64(0 if statistic is None else statistic.last or 0),
        sinks=np.int64(0 if far is None else far.sinks),
        **native.sums(statistic),
    )
    return out, () if statistic is None else (received,)


def _far(far: Far | None, batch: int, kv_heads: int) -> tuple[Array, Array, Array]:
    if far is None:
        return jnp.zeros(0), jnp.zeros(0), jnp.zeros(0, jnp.int32)
    limit = jnp.broadcast_to(far.limit, (batch, kv_heads, 1)).astype(jnp.int32)
    return far.queries, far.keys, limit
