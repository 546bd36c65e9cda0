"""Which slot of each head the next token goes to."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.pallas_kernels.dispatch import Operation


def _plain(
    positions: Int[Array, "batch rows slots"],
    priority: Float[Array, "batch kv_heads slots"],
    first: Int[Array, "batch kv_heads"],
    last: Int[Array, "batch kv_heads"],
) -> tuple[Int[Array, "batch kv_heads"]]:
    """The definition: of the slots from `first` to `last` an empty one, else that of the token with
    the lowest priority (of equals, the youngest).
    """
    slot = jnp.arange(positions.shape[2])
    usable = (slot >= first[..., None]) & (slot <= last[..., None])
    worth = jnp.where(positions < 0, -jnp.inf, priority)
    # Barriers keep XLA on CPU from computing all this anew inside each of the reductions.
    worth = lax.optimization_barrier(jnp.where(usable, worth, jnp.inf))
    lowest = worth == lax.optimization_barrier(jnp.min(worth, -1, keepdims=True))
    free = jnp.argmax(jnp.where(lowest & usable, positions, -2), -1)
    return (free.astype(jnp.int32),)


def _check(*arrays: Any) -> None:
    """The definition serves whatever a cache holds."""


_ROWS = ("batch", "kv_heads")
victim = Operation(
    name="victim",
    plain=_plain,
    check=_check,
    axes=((*_ROWS, None), (*_ROWS, None), _ROWS, _ROWS),
    out_axes=(_ROWS,),
    overrides={"native": "victim_cpu"},
)
