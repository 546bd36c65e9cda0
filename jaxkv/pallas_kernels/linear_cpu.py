"""Products of weights with few rows, on CPU: weights pass by once, at the speed of memory."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxkv.pallas_kernels import native
from jaxkv.pallas_kernels.linear import FEW_ROWS, linear


def check(x: Array, weight: Array) -> None:
    """Raises `NotImplementedError` for what `run` cannot serve."""
    if x.shape[0] > FEW_ROWS:
        raise NotImplementedError(f"rows must be at most {FEW_ROWS}, got {x.shape[0]}")
    if x.dtype != jnp.float32 or weight.dtype != jnp.float32:
        raise NotImplementedError(f"arrays must be float32, got {x.dtype} and {weight.dtype}")
    if not jax.sharding.get_abstract_mesh().empty:
        raise NotImplementedError("weights on a mesh are multiplied by XLA")
    native.check()


def run(x: Array, weight: Array) -> Array:
    """See `linear`."""
    out = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), x.dtype)
    call = functools.partial(native.call, "jaxkv_linear", out)
    return native.differentiable(call, linear.plain, x, weight)
