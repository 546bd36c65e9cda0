"""`prompt` on TPU: FlashAttention in two passes, in Pallas (Mosaic).

The first pass makes the output and each row's log-sum-exp. The second goes over blocks of keys, and
for each over the blocks of rows that see it, makes the probabilities again as exp(logit - lse) and
adds them up: one more product of queries and keys, and no matrix that is as large as the text
squared. Without statistics there is no second pass.

New tokens have consecutive positions, so those of rows follow from the first; keys come with
theirs, since the slots of a cache are in no order. Blocks that no row sees (later than the rows, or
before the window) are neither computed nor fetched.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxkv.attention import Far
from jaxkv.pallas_kernels.decode import column_sums
from jaxkv.pallas_kernels.decode_tpu_kernel import of_group
from jaxkv.pallas_kernels.dispatch import check_dtypes
from jaxkv.statistics import Statistic

_MASKED = -1e30
_LANES = 128
#: Rows of queries (those of all heads of a group) and keys in a block.
_ROWS, _KEYS = 512, 512


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
    """Raises `NotImplementedError` for what the kernel does not serve."""
    del query_positions, values, key_positions, window, layer
    column_sums(statistics)
    check_dtypes(queries=queries, keys=keys)
    if far is not None:
        raise NotImplementedError("distances with a ceiling are not served")
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"dtype must be float32 or bfloat16, got {keys.dtype.name}")
    group, t, dim = queries.shape[2:]
    if dim % 16:
        raise NotImplementedError(f"head dim must be a multiple of 16, got {dim}")
    if t < _LANES:
        raise NotImplementedError(f"blocks below {_LANES} tokens are not worth a kernel, got {t}")
    if group > 16:
        raise NotImplementedError(f"at most 16 query heads per KV head, got {group}")


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
    interpret: Any = False,
) -> tuple[Array, tuple[Array, ...]]:
    """See `jaxkv.attention.attend_block`; positions of new tokens must be consecutive."""
    del layer, far
    sums = column_sums(statistics)
    batch, kv_heads, group, t, dim = queries.shape
    count, size = keys.shape[2], keys.dtype.itemsize
    slots_last = dim % _LANES != 0
    rows, block = min(max(_ROWS // group // 16 * 16, 16), t), min(_KEYS, count)
    if block < count:
        block = block // _LANES * _LANES
    row_blocks, blocks = pl.cdiv(t, rows), pl.cdiv(count, block)
    first = query_positions[:, 0]
    added = jnp.sum(query_positions >= 0, 1, dtype=jnp.int32)
    static = {
        "window": window,
        "rows": rows,
        "block": block,
        "count": count,
        "before": count - t,
        "slots_last": slots_last,
    }
    inputs = [
        queries,
        jnp.swapaxes(keys, 2, 3) if slots_last else keys,
        values,
        key_positions[:, :, None],
    ]
    near = functools.partial(_near, rows=rows, block=block, before=count - t, window=window)

    def clamped(i: Any, j: Any, b: Any, added: Any) -> Any:
        """What is not needed is not fetched: the block of before, or of after, stays."""
        del b, added
        low, high = near(i)
        return jnp.clip(j, low, jnp.minimum(high, blocks - 1))

    last = t if sums is None or sums.last is None else sums.last

    def counted(i: Any, j: Any, b: Any, added: Any) -> Any:
        """A block of rows that sees block j of keys and of which some count, the nearest to i."""
        low = jnp.maximum(0, (j * block - (count - t)) // rows)
        low = jnp.maximum(low, jnp.maximum(added[b] - last, 0) // rows)
        high = jnp.maximum(pl.cdiv(added[b], rows) - 1, 0)
        return jnp.clip(i, jnp.minimum(low, high), high)

    def itself(x: Any, *_: Any) -> Any:
        return x

    def specs(rows_first: bool, row: Any, key: Any) -> dict[str, pl.BlockSpec]:
        """Blocks, where the last two of the grid are rows and keys (or keys and rows), and `row`
        and `key` say which block of each is meant.
        """

        def spec(shape: tuple[int | None, ...], index: Any) -> pl.BlockSpec:
            def at(b: Any, k: Any, x: Any, y: Any, first: Any, added: Any) -> Any:
                del first
                i, j = (x, y) if rows_first else (y, x)
                return (b, k, *index(row(i, j, b, added), key(i, j, b, added)))

            return pl.BlockSpec((None, None, *shape), at)

        along = spec((dim, block), lambda _, j: (0, j))
        return {
            "queries": spec((group, rows, dim), lambda i, _: (0, i, 0)),
            "keys": along if slots_last else spec((block, dim), lambda _, j: (j, 0)),
            "values": along,
            "by_key": spec((1, block), lambda _, j: (0, j)),
            "by_row": spec((None, 1, group * rows), lambda i, _: (i, 0, 0)),
        }

    # All but the last axis of the grid may be shared out.
    together = pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
    )
    scores = batch * kv_heads * group * t * count
    moved = (batch * kv_heads * row_blocks * count * dim * 2 + 2 * queries.size) * size
    blocked = specs(True, itself, clamped)
    out, lse = pl.pallas_call(
        functools.partial(_forward, **static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, row_blocks, blocks),
            in_specs=[blocked[name] for name in ("queries", "keys", "values", "by_key")],
            out_specs=[blocked["queries"], blocked["by_row"]],
            scratch_shapes=[
                pltpu.VMEM((group * rows, dim), jnp.float32),
                pltpu.VMEM((group * rows, _LANES), jnp.float32),
                pltpu.VMEM((group * rows, _LANES), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct((batch, kv_heads, row_blocks, 1, group * rows), jnp.float32),
        ],
        compiler_params=together,
        cost_estimate=pl.CostEstimate(
            flops=4 * scores * dim, bytes_accessed=moved, transcendentals=scores
        ),
        interpret=interpret,
        name="prompt",
    )(first, added, *inputs)
    if sums is None:
        return out, ()
    blocked = specs(False, counted, lambda _, j, *__: j)
    received = pl.pallas_call(
        functools.partial(_column_sums, sums=sums, last=last, **static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, blocks, row_blocks),
            in_specs=[blocked[name] for name in ("queries", "keys", "by_key", "by_row")],
            out_specs=blocked["by_key"],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, 1, count), jnp.float32),
        compiler_params=together,
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * dim, bytes_accessed=moved // 2, transcendentals=scores
        ),
        interpret=interpret,
        name="prompt_sums",
    )(first, added, inputs[0], inputs[1], inputs[3], lse)
    return out, (received[:, :, 0],)


def _near(i: Any, *, rows: int, block: int, before: int, window: int | None) -> tuple[Any, Any]:
    """First and last block of keys that a block of rows may see. Of the new tokens' own keys that
    is known from their order; stored ones may all be seen.
    """
    high = (i * rows + rows - 1 + before) // block
    if window is None or before:
        return 0, high
    return jnp.maximum(0, (i * rows - window + 1) // block), high


def _probabilities(
    queries, keys, positions, first, added, i, j, *, window, rows, block, count, slots_last
):
    """Logits of a block of rows and a block of keys, [group * rows, block], -1e30 where a row does
    not see a key; whether any row may see a key, [1, block]; the number of each row, [.., 1].
    """
    group, _, dim = queries.shape
    # Mosaic would round float32 to bfloat16.
    exact = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else lax.Precision.DEFAULT
    logits = lax.dot_general(
        queries.reshape(group * rows, dim),
        keys,
        (((1,), (0 if slots_last else 1,)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    row = lax.broadcasted_iota(jnp.int32, (group, rows, 1), 1).reshape(group * rows, 1) + i * rows
    column = lax.broadcasted_iota(jnp.int32, (1, block), 1) + j * block
    there = (positions >= 0) & (column < count)
    seen = there & (positions <= first + row) & (row < added)
    if window is not None:
        seen &= first + row - positions < window
    return jnp.where(seen, logits * dim**-0.5, _MASKED), there, row


def _forward(
    first_ref,  # SMEM [batch] int32: position of the first new token
    added_ref,  # SMEM [batch] int32: how many are real
    queries_ref,  # [group, rows, dim]
    keys_ref,  # [dim, block], or [block, dim] where slots are rows
    values_ref,  # [dim, block]
    positions_ref,  # [1, block] int32
    out_ref,  # [group, rows, dim]
    lse_ref,  # [1, group * rows]
    acc_ref,  # [group * rows, dim]: the output in the making
    high_ref,  # [group * rows, 128]: the highest logit so far
    sum_ref,  # [group * rows, 128]
    *,
    before,
    **static,
):
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first, added = first_ref[b], added_ref[b]
    rows, block = static["rows"], static["block"]
    low, high = _near(i, rows=rows, block=block, before=before, window=static["window"])

    @pl.when(j == 0)
    def _start():
        high_ref[...] = jnp.full(high_ref.shape, _MASKED, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    @pl.when((j >= low) & (j <= high) & (i * rows < added))
    def _attend():
        queries, values = queries_ref[...], values_ref[...]
        logits, there, _ = _probabilities(
            queries, keys_ref[...], positions_ref[...], first, added, i, j, **static
        )
        highest = high_ref[:, :1]
        higher = jnp.maximum(highest, jnp.max(logits, 1, keepdims=True))
        # Rows that have seen nothing so far must not take what they do not see for a 1.
        weights = jnp.where(logits > 0.5 * _MASKED, jnp.exp(logits - higher), 0.0)
        rescale = jnp.exp(highest - higher)
        # What is not there may be anything, and 0 * NaN is NaN.
        values = jnp.where(there, values, jnp.zeros((), values.dtype))
        exact = lax.Precision.HIGHEST if values.dtype == jnp.float32 else lax.Precision.DEFAULT
        added_up = lax.dot_general(
            weights.astype(values.dtype),
            values,
            (((1,), (1,)), ((), ())),
            precision=exact,
            preferred_element_type=jnp.float32,
        )
        acc_ref[...] = acc_ref[...] * rescale + added_up
        sum_ref[...] = sum_ref[...] * rescale + jnp.sum(weights, 1, keepdims=True)
        high_ref[...] = jnp.broadcast_to(higher, high_ref.shape)

    @pl.when(j == pl.num_programs(3) - 1)
    def _finish():
        total = sum_ref[...]
        something = total > 0
        share = jnp.where(something, 1 / jnp.where(something, total, 1.0), 0.0)
        out = acc_ref[...] * share[:, :1]
        out_ref[...] = out.reshape(out_ref.shape).astype(out_ref.dtype)
        # Rows that see nothing get a log-sum-exp from which every probability is 0.
        lse = jnp.where(
            something, high_ref[...] + jnp.log(jnp.where(something, total, 1.0)), -_MASKED
        )
        lse_ref[...] = jnp.transpose(lse)[:1]


def _column_sums(
    first_ref,
    added_ref,
    queries_ref,  # [group, rows, dim]
    keys_ref,  # [dim, block], or [block, dim]
    positions_ref,  # [1, block] int32
    lse_ref,  # [1, group * rows]
    received_ref,  # [1, block]
    *,
    sums,
    last,
    before,
    **static,
):
    b, j, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    first, added = first_ref[b], added_ref[b]
    rows, block, window = static["rows"], static["block"], static["window"]
    low, high = _near(i, rows=rows, block=block, before=before, window=window)

    @pl.when(i == 0)
    def _start():
        received_ref[...] = jnp.zeros(received_ref.shape, jnp.float32)

    counts = (i * rows < added) & (i * rows + rows > added - last)

    @pl.when((j >= low) & (j <= high) & counts)
    def _add():
        queries = queries_ref[...]
        logits, _, row = _probabilities(
            queries, keys_ref[...], positions_ref[...], first, added, i, j, **static
        )
        lse = jnp.transpose(jnp.broadcast_to(lse_ref[...], (_LANES, lse_ref.shape[1])))[:, :1]
        probabilities = jnp.where(row >= added - last, jnp.exp(logits - lse), 0.0)
        group = queries.shape[0]
        by_head = probabilities.reshape(group, rows, block)
        received = of_group(sums, by_head)
        received_ref[...] += jnp.sum(received, 0, keepdims=True)
