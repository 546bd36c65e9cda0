"""The next slot, on CPU: positions and priorities pass by in vectors."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.pallas_kernels import native


def check(positions: Array, priority: Array, first: Array, last: Array) -> None:
    """Raises `NotImplementedError` for what `run` cannot serve."""
    del last
    if not positions.shape[:2] == priority.shape[:2] == first.shape:
        raise NotImplementedError(
            f"each KV head must have its own slots, got {positions.shape[1]} rows of slots for "
            f"{first.shape[1]} KV heads"
        )
    native.check()


def run(positions: Array, priority: Array, first: Array, last: Array) -> tuple[Array]:
    """See `victim`."""
    out = jax.ShapeDtypeStruct(first.shape, jnp.int32)
    return (native.call("jaxkv_victim", out, positions, priority, first, last),)
