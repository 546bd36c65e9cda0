"""Policies that look only at positions: everything, the latest tokens, the first and the latest,
a random sample. They need no statistic of attention."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.policies.base import Policy, Tokens, protect, register


@register
@dataclasses.dataclass(frozen=True)
class Full(Policy):
    """Keeps every token: plain attention. `budget` is accepted so that policies can be swapped,
    and does nothing."""

    budget: int | float = 1.0

    name: ClassVar[str] = "full"
    source: ClassVar[str] = "plain attention"
    evicts: ClassVar[bool] = False

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return jnp.zeros(tokens.positions.shape, jnp.float32)


@register
@dataclasses.dataclass(frozen=True)
class Window(Policy):
    """Keeps the newest tokens ("local" in the H2O paper). The naive form: older tokens are cut
    from the cache, the context is not run again."""

    budget: int | float = 1024

    name: ClassVar[str] = "window"
    source: ClassVar[str] = "Longformer, arXiv 2004.05150"

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return tokens.positions.astype(jnp.float32)

    def split(self, budget: int) -> dict[str, int]:
        return {"recent": budget}


@register
@dataclasses.dataclass(frozen=True)
class Streaming(Policy):
    """Keeps the first `sinks` tokens and the newest ones (StreamingLLM, arXiv 2309.17453).

    Attributes:
      budget: sinks and newest tokens together; at least `sinks + 1`.
      sinks: how many of the first tokens always stay.
      positions: "rolling" as in the paper (a token sits at its rank in the cache, and the text
        may be longer than anything the model was trained on), or "original" (what several other
        libraries call by this name).
    """

    budget: int | float = 1024
    sinks: int = 4
    positions: str = "rolling"

    name: ClassVar[str] = "streaming"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    def __post_init__(self) -> None:
        if not isinstance(self.sinks, int) or self.sinks < 0:
            raise ValueError(f"sinks must be an int >= 0, got {self.sinks!r}")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.sinks + 1

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return protect(tokens.positions < self.sinks, tokens.positions.astype(jnp.float32))

    def split(self, budget: int) -> dict[str, int]:
        return {"sinks": self.sinks, "recent": budget - self.sinks}


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
    source: ClassVar[str] = "baseline"

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        heads = jnp.arange(tokens.positions.shape[1], dtype=jnp.uint32)[None, :, None]
        bits = tokens.positions.astype(jnp.uint32)
        for salt in (heads, tokens.layer.astype(jnp.uint32), jnp.uint32(self.seed % 2**32)):
            bits = _mix(bits ^ (salt * jnp.uint32(0x9E3779B9)))
        return (bits >> 8).astype(jnp.float32)


def _mix(bits: Array) -> Array:
    """The finalizer of MurmurHash3: every input bit changes every output bit."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
