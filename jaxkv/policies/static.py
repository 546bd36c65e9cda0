"""Policies that look only at positions: everything, the latest tokens, the first and the latest.
They need no statistic of attention.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.policies.base import Policy, Tokens, protect, register


@register
@dataclasses.dataclass(frozen=True)
class Full(Policy):
    """Keeps every token: plain attention. `budget` is accepted so that policies can be swapped,
    and does nothing.
    """

    budget: int | float = 1.0

    name: ClassVar[str] = "full"
    keeps: ClassVar[str] = "every token"
    source: ClassVar[str] = "plain attention"
    evicts: ClassVar[bool] = False

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return jnp.zeros(tokens.positions.shape, jnp.float32)


@register
@dataclasses.dataclass(frozen=True)
class Window(Policy):
    """Keeps the newest tokens ("local" in the H2O paper). The naive form: older tokens are cut
    from the cache, the context is not run again.
    """

    budget: int | float = 1024

    name: ClassVar[str] = "window"
    keeps: ClassVar[str] = "the newest tokens"
    source: ClassVar[str] = "Longformer, arXiv 2004.05150"

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return -tokens.age.astype(jnp.float32)

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
    keeps: ClassVar[str] = "the first tokens and the newest"
    source: ClassVar[str] = "StreamingLLM, arXiv 2309.17453"

    def __post_init__(self) -> None:
        if type(self.sinks) is not int or self.sinks < 0:
            raise ValueError(f"sinks must be an int >= 0, got {self.sinks!r}")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.sinks + 1

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return protect(tokens.positions < self.sinks, -tokens.age.astype(jnp.float32))

    def split(self, budget: int) -> dict[str, int]:
        return {"sinks": self.sinks, "recent": budget - self.sinks}
