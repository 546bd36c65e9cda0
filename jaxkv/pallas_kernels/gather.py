"""Compressing: the keys and values of chosen tokens, side by side."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.pallas_kernels.dispatch import Operation, check_dtypes


def _plain(
    keys: Float[Array, "batch kv_heads tokens dim"],
    values: Float[Array, "batch kv_heads dim tokens"],
    source: Int[Array, "batch kv_heads taken"],
) -> tuple[Float[Array, "batch kv_heads taken dim"], Float[Array, "batch kv_heads dim taken"]]:
    """The definition: the tokens at indices `source`, which must be valid."""
    return (
        jnp.take_along_axis(keys, source[..., None], 2),
        jnp.take_along_axis(values, source[..., None, :], 3),
    )


def _check(keys: Any, values: Any, source: Any) -> None:
    del source
    check_dtypes(keys=keys, values=values)


_ROWS = ("batch", "kv_heads", None, None)
gather = Operation(
    name="gather",
    plain=_plain,
    check=_check,
    axes=(_ROWS, _ROWS, _ROWS[:3]),
    out_axes=(_ROWS, _ROWS),
    overrides={"mosaic": "gather_tpu"},
)
