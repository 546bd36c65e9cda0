"""`gather` on TPU: chosen tokens by products with a matrix of zeros and ones, in Pallas (Mosaic).

Vectors have no cheap way to move between lanes, and single rows make poor copies; but the matrix
unit is idle when a cache is compressed, and a product with one 1 per column is exact. All tokens
must be finite, chosen or not.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxkv.pallas_kernels.dispatch import check_dtypes

_LANES = 128
#: Tokens in a block, of those there are and of those taken.
_BLOCK = 512


def check(keys: Array, values: Array, source: Array) -> None:
    """Raises `NotImplementedError` for what the kernel does not serve."""
    check_dtypes(keys=keys, values=values)
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"dtype must be float32 or bfloat16, got {keys.dtype.name}")
    dim, count, taken = keys.shape[3], keys.shape[2], source.shape[2]
    if dim % 16:
        raise NotImplementedError(f"head dim must be a multiple of 16, got {dim}")
    if min(count, taken) < _LANES:
        raise NotImplementedError(
            f"fewer tokens than {_LANES} are not worth a kernel, got {count} of which {taken}"
        )


def run(
    keys: Array, values: Array, source: Array, *, interpret: Any = False
) -> tuple[Array, Array]:
    """See `jaxkv.pallas_kernels.gather`."""
    batch, kv_heads, count, dim = keys.shape
    taken, size = source.shape[2], keys.dtype.itemsize
    # As in `decode_tpu`: of such keys, TPU stores slots last.
    slots_last = dim % _LANES != 0
    block, width = min(_BLOCK, count // _LANES * _LANES), min(_BLOCK, taken // _LANES * _LANES)
    grid = (batch, kv_heads, pl.cdiv(taken, width), pl.cdiv(count, block))

    def spec(shape: tuple[int, int], index: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *shape), lambda b, k, m, n: (b, k, *index(m, n)))

    along_in = spec((dim, block), lambda _, n: (0, n))
    along_out = spec((dim, width), lambda m, _: (0, m))
    down_in, down_out = (
        spec((block, dim), lambda _, n: (n, 0)),
        spec((width, dim), lambda m, _: (m, 0)),
    )
    stored = jnp.swapaxes(keys, 2, 3) if slots_last else keys
    shapes = [
        (batch, kv_heads, dim, taken) if slots_last else (batch, kv_heads, taken, dim),
        (batch, kv_heads, dim, taken),
    ]
    some, all_values = pl.pallas_call(
        functools.partial(_kernel, count=count, slots_last=slots_last),
        grid=grid,
        in_specs=[
            spec((1, width), lambda m, _: (0, m)),
            along_in if slots_last else down_in,
            along_in,
        ],
        out_specs=[along_out if slots_last else down_out, along_out],
        out_shape=[jax.ShapeDtypeStruct(shape, keys.dtype) for shape in shapes],
        scratch_shapes=[
            pltpu.VMEM((dim, width) if slots_last else (width, dim), jnp.float32),
            pltpu.VMEM((dim, width), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * kv_heads * count * taken * dim,
            bytes_accessed=2 * batch * kv_heads * dim * size * (grid[2] * count + taken),
            transcendentals=0,
        ),
        interpret=interpret,
        name="gather",
    )(source[:, :, None], stored, values)
    return jnp.swapaxes(some, 2, 3) if slots_last else some, all_values


def _kernel(
    source_ref,  # [1, width] int32
    keys_ref,  # [dim, block], or [block, dim] where tokens are rows
    values_ref,  # [dim, block]
    taken_keys_ref,  # [dim, width], or [width, dim]
    taken_values_ref,  # [dim, width]
    keys_acc_ref,
    values_acc_ref,
    *,
    count,
    slots_last,
):
    n = pl.program_id(3)
    keys, values = keys_ref[...], values_ref[...]
    block, width = values.shape[1], source_ref.shape[1]
    exact = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else lax.Precision.DEFAULT
    start = n * block
    token = start + lax.broadcasted_iota(jnp.int32, (block, width), 0)
    chosen = (token == source_ref[...]).astype(keys.dtype)
    if count % block:
        # Beyond the end there may be anything, and 0 * NaN is NaN.
        there = start + lax.broadcasted_iota(jnp.int32, (1, block), 1) < count
        values = jnp.where(there, values, jnp.zeros((), values.dtype))
        if not slots_last:
            there = start + lax.broadcasted_iota(jnp.int32, (block, 1), 0) < count
        keys = jnp.where(there, keys, jnp.zeros((), keys.dtype))

    def product(a, b, contract):
        return lax.dot_general(
            a,
            b,
            ((contract[:1], contract[1:]), ((), ())),
            precision=exact,
            preferred_element_type=jnp.float32,
        )

    some = product(keys, chosen, (1, 0)) if slots_last else product(chosen, keys, (0, 0))
    more = product(values, chosen, (1, 0))

    @pl.when(n == 0)
    def _start():
        keys_acc_ref[...] = some
        values_acc_ref[...] = more

    @pl.when(n > 0)
    def _add():
        keys_acc_ref[...] += some
        values_acc_ref[...] += more

    @pl.when(n == pl.num_programs(3) - 1)
    def _finish():
        taken_keys_ref[...] = keys_acc_ref[...].astype(taken_keys_ref.dtype)
        taken_values_ref[...] = values_acc_ref[...].astype(taken_values_ref.dtype)
