"""Quest: everything is kept, and a step reads the pages that its query may care about."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.policies.base import Policy, Tokens, register


@register
@dataclasses.dataclass(frozen=True)
class Quest(Policy):
    """Query-aware sparsity (Tang et al. 2024), see `jaxkv.pages`. Saves reading, not memory.

    A page's score is an upper bound of the attention logit that any of its keys could have, the
    highest over the query heads of a KV head. The page of the newest token is always read.

    Attributes:
      budget: tokens read by a step: `budget // page` pages, at least `least`.
      page: tokens of a page.
      least: pages read at least, the newest token's included.
      dense_layers: the first layers read everything.

    """

    page: int = 16
    least: int = 3
    dense_layers: int = 2

    name: ClassVar[str] = "quest"
    keeps: ClassVar[str] = "every token; reads the pages that may matter"
    frees: ClassVar[str] = "nothing; reads less"
    source: ClassVar[str] = "Quest, arXiv 2406.10774"
    drops: ClassVar[Literal["never"]] = "never"
    selects: ClassVar[Literal["pages"]] = "pages"

    def __post_init__(self) -> None:
        for name, least in (("page", 1), ("least", 1), ("dense_layers", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        if self.positions != "original":
            raise ValueError(f"{self.name} bounds keys at original positions: {self!r}")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.page

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return jnp.zeros(tokens.positions.shape, jnp.float32)

    def page_of(self, layer: int) -> int | None:
        return None if layer < self.dense_layers else self.page

    def most_pages(self) -> int:
        """The largest number of pages that a step reads, for a budget in tokens."""
        assert isinstance(self.budget, int)
        return max(self.least, self.budget // self.page)

    def pages(self, budget: Int[Array, "batch kv_heads"]) -> Int[Array, "batch kv_heads"]:
        """How many pages a step reads for a budget of tokens."""
        return jnp.maximum(self.least, budget // self.page)

    def split(self, budget: int) -> dict[str, int]:
        return {"pages": max(self.least, budget // self.page)}
