"""Attention of a block of new tokens on NVIDIA GPUs, by Triton.

The first kernel is flash attention that keeps the log-sum-exp of every row in float32. The second
one makes the probabilities again, by keys instead of by rows, and sums them up: one more product
of queries and keys, and no matrix of rows times keys in memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.attention import Far
from jaxkv.pallas_kernels.decode import column_sums
from jaxkv.pallas_kernels.decode_gpu import (
    LOG2_E,
    call,
    check_sizes,
    power_of_two,
    refuse_interpreter,
)
from jaxkv.pallas_kernels.dispatch import check_dtypes
from jaxkv.pallas_kernels.triton_prompt import prompt_attend, prompt_collect
from jaxkv.statistics import Statistic

#: The second dimension of a grid has no more.
_MOST_ROWS = 2**16 - 1


class _Tile(NamedTuple):
    """Rows and keys that are handled at once, and how."""

    rows: int
    keys: int
    warps: int
    stages: int


#: By bytes of an element and padded head dim. Not timed: chosen by what the compiler says, so that
#: (almost) nothing is spilled from registers and every GPU since compute capability 8.0 has the
#: shared memory.
_ATTEND = {
    (2, 64): _Tile(128, 64, 4, 3),
    (2, 128): _Tile(128, 64, 8, 3),
    (2, 256): _Tile(64, 32, 8, 2),
    (4, 64): _Tile(32, 32, 8, 2),
    (4, 128): _Tile(32, 16, 8, 2),
    (4, 256): _Tile(32, 16, 8, 2),
}
_COLLECT = {
    (2, 64): _Tile(64, 64, 4, 3),
    (2, 128): _Tile(64, 64, 4, 3),
    (2, 256): _Tile(64, 64, 8, 2),
    (4, 64): _Tile(32, 32, 4, 2),
    (4, 128): _Tile(32, 32, 4, 2),
    (4, 256): _Tile(16, 16, 4, 2),
}


def check(
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
) -> None:
    """Raises `NotImplementedError` for what `run` cannot serve."""
    del query_positions, key_positions, window, layer
    check_dtypes(queries=queries, keys=keys, values=values)
    check_sizes(keys.dtype, keys.shape[3], statistics)
    if far is not None:
        raise NotImplementedError("distances must be exact, not held at a limit")
    rows = queries.shape[0] * queries.shape[1] * queries.shape[2]
    if rows > _MOST_ROWS:
        raise NotImplementedError(
            f"query heads of all sequences must be at most {_MOST_ROWS} together, got {rows}"
        )


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
    interpret: bool = False,
) -> tuple[Array, tuple[Array, ...]]:
    """See `jaxkv.attention.attend_block`. Positions of the block's real tokens are consecutive, and
    padding follows them.

    Raises:
      ValueError: `interpret` is asked for: Triton's interpreter cannot be called from JAX.

    """
    del layer, far
    refuse_interpreter(interpret)
    batch, kv_heads, group, t, dim = queries.shape
    statistic = column_sums(statistics)
    padded_dim = power_of_two(dim, 16)
    kind = (keys.dtype.itemsize, max(64, padded_dim))
    sizes: dict[str, Any] = {
        "kv_heads": kv_heads,
        "group": group,
        "dim": dim,
        "padded_dim": padded_dim,
        "t": t,
        "before": keys.shape[2] - t,
        "scale": dim**-0.5 * LOG2_E,
        "window": window or 0,
    }
    tile = _ATTEND[kind]
    out, lse = call(
        prompt_attend,
        *(queries, query_positions, keys, values, key_positions),
        out_shape=(
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct(queries.shape[:-1], jnp.float32),
        ),
        grid=(-(-t // tile.rows), batch * kv_heads * group),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **sizes,
        rows=tile.rows,
        block=tile.keys,
    )
    if statistic is None:
        return out, ()
    tile = _COLLECT[kind]
    stored = -(-sizes["before"] // tile.keys)
    received = call(
        prompt_collect,
        *(queries, query_positions, jnp.max(query_positions, 1), keys, key_positions, lse),
        out_shape=jax.ShapeDtypeStruct(key_positions.shape, jnp.float32),
        grid=(stored + -(-t // tile.keys), batch * kv_heads),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **sizes,
        block=tile.keys,
        power=float(statistic.power),
        reduction=statistic.group,
        last=statistic.last or 0,
    )
    return out, (received,)
