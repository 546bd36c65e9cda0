"""The baseline that any method must beat: a random sample of the tokens."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.policies.base import Policy, Tokens, register


@register
@dataclasses.dataclass(frozen=True)
class Random(Policy):
    """Keeps a uniform random sample of the tokens seen so far: the floor any method must beat.

    Each token draws a number once, from its position, head, layer and `seed`, and the largest
    stay. So the sample does not depend on how the text was cut into blocks or batches.
    """

    budget: int | float = 0.2
    seed: int = 0

    name: ClassVar[str] = "random"
    keeps: ClassVar[str] = "a random sample"
    source: ClassVar[str] = "baseline"

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return uniform(tokens.positions, tokens.layer, self.seed)


def uniform(
    positions: Int[Array, "batch kv_heads candidates"], layer: Int[Array, ""], seed: int
) -> Float[Array, "batch kv_heads candidates"]:
    """A number in [0, 1) for each token, from its position, head, layer and `seed` alone."""
    heads = jnp.arange(positions.shape[1], dtype=jnp.uint32)[None, :, None]
    bits = positions.astype(jnp.uint32)
    for salt in (heads, layer.astype(jnp.uint32), jnp.uint32(seed % 2**32)):
        bits = _mix(bits ^ (salt * jnp.uint32(0x9E3779B9)))
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def _mix(bits: Array) -> Array:
    """The finalizer of MurmurHash3: every input bit changes every output bit."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
