"""Writing the value of one new token into its slot, where nothing else is done with the values."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.pallas_kernels.dispatch import Operation, check_dtypes


def _plain(
    values: Float[Array, "batch kv_heads dim slots"],
    value: Float[Array, "batch kv_heads dim"],
    free: Int[Array, "batch kv_heads"],
) -> Float[Array, "batch kv_heads dim slots"]:
    """The definition: `value` in the slot `free`, which must be valid."""
    b, k = jnp.arange(values.shape[0])[:, None], jnp.arange(values.shape[1])[None]
    return values.at[b, k, :, free].set(value, mode="promise_in_bounds", unique_indices=True)


def _check(values: Any, value: Any, free: Any) -> None:
    del free
    check_dtypes(values=values, value=value)


_HEADS = ("batch", "kv_heads")
write = Operation(
    name="write",
    plain=_plain,
    check=_check,
    axes=((*_HEADS, None, None), (*_HEADS, None), _HEADS),
    out_axes=(*_HEADS, None, None),
    overrides={"mosaic": "write_tpu"},
)
