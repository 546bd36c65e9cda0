"""Products of weights with new tokens' hidden states."""

from typing import Any

from jax import Array, lax
from jaxtyping import Float

from jaxkv.pallas_kernels.dispatch import Operation

#: Up to this many rows the weight is the left operand, which XLA on CPU reads faster.
FEW_ROWS = 32


def _plain(x: Float[Array, "rows in"], weight: Float[Array, "out in"]) -> Float[Array, "rows out"]:
    """The definition: `x @ weight.T`."""
    if x.shape[0] <= FEW_ROWS:
        return lax.dot_general(weight, x, (((1,), (1,)), ((), ()))).T
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


def _check(*arrays: Any) -> None:
    """The definition serves whatever JAX multiplies."""


linear = Operation(
    name="linear",
    plain=_plain,
    check=_check,
    axes=((None, None), (None, None)),
    out_axes=(None, None),
    overrides={"native": "linear_cpu"},
)
