"""`write` on TPU, in Pallas (Mosaic): the tile around the slot is written, and nothing else moves.

XLA writes a column by a scatter for which it stores slots before dims. A loop of decode steps would
begin with a copy of all values in that order and end with one back: for layers that share keys
(`jaxkv.PoD`) more than a third of the cache again, as much as sharing saves.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxkv.pallas_kernels.decode_tpu_kernel import column
from jaxkv.pallas_kernels.dispatch import check_dtypes

_LANES = 128


def check(values: Array, value: Array, free: Array) -> None:
    """Raises `NotImplementedError` for what the kernel does not serve."""
    del free
    check_dtypes(values=values, value=value)
    dim, slots = values.shape[2:]
    if values.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"dtype must be float32 or bfloat16, got {values.dtype.name}")
    if dim % 16:
        raise NotImplementedError(f"head dim must be a multiple of 16, got {dim}")
    if slots < _LANES:
        raise NotImplementedError(f"fewer slots than {_LANES} are not worth a kernel, got {slots}")


def run(values: Array, value: Array, free: Array, *, interpret: Any = False) -> Array:
    """See `jaxkv.pallas_kernels.write`."""
    batch, kv_heads, dim, _ = values.shape
    tile = pl.BlockSpec(
        (None, None, dim, _LANES), lambda b, k, free: (b, k, 0, free[b, k] // _LANES)
    )
    shape: Any = values
    if not interpret:
        # The compiler would bring a layer that fits into VMEM as a whole, and write all of it back.
        values = pltpu.with_memory_space_constraint(values, pltpu.HBM)
        shape = pltpu.HBM(values.shape, values.dtype)
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads),
            in_specs=[
                pl.BlockSpec((None, None, 1, dim), lambda b, k, _: (b, k, 0, 0)),
                tile,
            ],
            out_specs=tile,
        ),
        out_shape=shape,
        # Counted with the prefetched operand.
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=0,
            bytes_accessed=2 * batch * kv_heads * dim * _LANES * values.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="write",
    )(free, value[:, :, None], values)


def _kernel(
    free_ref,  # SMEM [batch, kv_heads] int32
    value_ref,  # [1, dim], of the new token
    values_ref,  # [dim, 128], the tile around the slot
    out_ref,  # the same tile
):
    free = free_ref[pl.program_id(0), pl.program_id(1)]
    at = lax.broadcasted_iota(jnp.int32, (1, _LANES), 1) == free % _LANES
    out_ref[...] = jnp.where(at, column(value_ref[...]), values_ref[...])
