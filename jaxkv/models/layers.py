"""The parts that models are made of, as `flax.nnx` modules.

Weights keep the layout and the names of the checkpoint, `(out, in)`: as the left operand of a
product with few rows they are read two to three times faster on CPU than `(in, out)`.
Every parameter names its logical axes, which one table maps to mesh axes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.config import Config
from jaxkv.pallas_kernels.linear import linear

_normal = jax.nn.initializers.normal(0.02)


def _param(
    rngs: nnx.Rngs | None,
    init: Callable[..., Array],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
) -> nnx.Param:
    """A parameter; without `rngs` only its shape, which is much faster than `nnx.eval_shape`."""
    abstract = jax.ShapeDtypeStruct(shape, jnp.float32)
    value = abstract if rngs is None else init(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, logical_axes=axes)


class Linear(nnx.Module):
    """`y = W x + b` with W of shape (out, in)."""

    def __init__(
        self, inputs: int, outputs: int, axes: tuple[str, str], bias: bool, *, rngs: nnx.Rngs | None
    ):
        self.weight = _param(rngs, _normal, (outputs, inputs), axes)
        self.bias = _param(rngs, jax.nn.initializers.zeros, (outputs,), axes[:1]) if bias else None

    def __call__(self, x: Float[Array, "*rows in"]) -> Float[Array, "*rows out"]:
        y = matmul(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


def matmul(x: Float[Array, "*rows in"], weight: Float[Array, "out in"]) -> Array:
    """`x @ weight.T`."""
    rows = x.reshape(-1, x.shape[-1])
    return linear(rows, weight).reshape(*x.shape[:-1], weight.shape[0])


class Embedding(nnx.Module):
    """A table of shape (entries, features)."""

    def __init__(
        self, entries: int, features: int, axes: tuple[str, str], *, rngs: nnx.Rngs | None
    ):
        self.weight = _param(rngs, _normal, (entries, features), axes)

    def __call__(self, ids: Int[Array, "*shape"]) -> Float[Array, "*shape features"]:
        return self.weight[...][ids]


def far_map(config: Config, *, rngs: nnx.Rngs | None) -> nnx.Param:
    """One matrix per query head, at first the identity."""
    shape = (config.num_heads, config.head_dim, config.head_dim)

    def identity(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        del key
        return jnp.broadcast_to(jnp.eye(shape[-1], dtype=dtype), shape)

    return _param(rngs, identity, shape, ("heads", "head_dim", "head_dim"))


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32."""

    def __init__(self, features: int, eps: float, axis: str = "embed", *, rngs: nnx.Rngs | None):
        self.weight = _param(rngs, jax.nn.initializers.ones, (features,), (axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*shape features"]) -> Float[Array, "*shape features"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * self.weight[...]


class LayerNorm(nnx.Module):
    """Layer norm with bias over the last axis, in float32."""

    def __init__(self, features: int, eps: float, *, rngs: nnx.Rngs | None):
        self.weight = _param(rngs, jax.nn.initializers.ones, (features,), ("embed",))
        self.bias = _param(rngs, jax.nn.initializers.zeros, (features,), ("embed",))
        self.eps = eps

    def __call__(self, x: Float[Array, "*shape features"]) -> Float[Array, "*shape features"]:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, -1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * self.weight[...] + self.bias[...]


#: By the name that a checkpoint's config gives them.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_fast": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
}
