"""Rules that look at keys alone: no attention has to be collected."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.policies.base import New, Policy, Tokens, register


@register
@dataclasses.dataclass(frozen=True)
class Knorm(Policy):
    """Keys of small norm attract attention (Devoto et al. 2024): the largest keys go."""

    name: ClassVar[str] = "knorm"
    keeps: ClassVar[str] = "tokens with small keys"
    source: ClassVar[str] = "L2 norm, arXiv 2406.11430"
    needs_traits: ClassVar[bool] = True

    def trait(self, new: New) -> Float[Array, "batch kv_heads t"]:
        return jnp.linalg.norm(new.keys.astype(jnp.float32), axis=-1)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.traits is not None
        return -tokens.traits


@register
@dataclasses.dataclass(frozen=True)
class KeyDiff(Policy):
    """Keys unlike the others matter (Park et al. 2025): those closest in direction to the mean of
    all normalised keys go. Reads every key once more at each step.
    """

    name: ClassVar[str] = "keydiff"
    keeps: ClassVar[str] = "tokens whose keys are unlike the others"
    source: ClassVar[str] = "KeyDiff, arXiv 2504.15364"

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        keys = tokens.keys.astype(jnp.float32)
        unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)
        there = (tokens.positions >= 0).astype(jnp.float32)
        anchor = jnp.einsum("bksd,bks->bkd", unit, there)
        length = jnp.maximum(jnp.linalg.norm(anchor, axis=-1), 1e-12)
        return -jnp.einsum("bksd,bkd->bks", unit, anchor) / length[..., None]
