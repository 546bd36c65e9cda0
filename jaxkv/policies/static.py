"""Policies that look only at positions: everything, the latest tokens, the first and the latest.
They need no statistic of attention.
"""

import dataclasses
from typing import Any, ClassVar, Literal

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
    frees: ClassVar[str] = "nothing"
    drops: ClassVar[Literal["never"]] = "never"

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
    tokenwise: ClassVar[bool] = True

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
    tokenwise: ClassVar[bool] = True

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


@register
@dataclasses.dataclass(frozen=True)
class LMInfinite(Policy):
    """Keeps the first `globals` tokens and the newest (Han et al. 2023). No distance that is seen
    exceeds `max_distance`: a first token that is further away is read as if it were that far.

    Attributes:
      budget: first and newest tokens together; more than `globals`.
      globals: how many of the first tokens always stay.
      max_distance: in tokens; at most what the model was trained on. None: the number of newest
        tokens that are kept.

    """

    budget: int | float = 1024
    globals: int = 10
    max_distance: int | None = None  # type: ignore[misc]
    positions: str = "ceiling"

    name: ClassVar[str] = "lm_infinite"
    keeps: ClassVar[str] = "the first tokens and the newest, at bounded distance"
    source: ClassVar[str] = "LM-Infinite, arXiv 2308.16137"

    def __post_init__(self) -> None:
        if type(self.globals) is not int or self.globals < 0:
            raise ValueError(f"globals must be an int >= 0, got {self.globals!r}")
        far = self.max_distance
        if far is not None and (type(far) is not int or far < 1):
            raise ValueError(f"max_distance must be an int >= 1 or None, got {far!r}")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.globals + 1

    def limit(self, budget: Any) -> Any:
        if self.max_distance is None:
            return budget - self.globals
        return budget * 0 + self.max_distance

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return protect(tokens.positions < self.globals, -tokens.age.astype(jnp.float32))

    def split(self, budget: int) -> dict[str, int]:
        return {"globals": self.globals, "recent": budget - self.globals}
