"""The H2O paper's other baselines: patterns of the Sparse Transformer, and the best k by the
current attention.
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxkv.cache import places
from jaxkv.policies.base import Policy, Tokens, protect, register

# Orders with a second criterion are packed into the 24 bits that float32 holds exactly.
_SECOND = 2**12
_AGES = 2**19


def _check_positive(name: str, value: object) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name} must be an int >= 1 or None, got {value!r}")


@register
@dataclasses.dataclass(frozen=True)
class Strided(Policy):
    """The strided pattern of the Sparse Transformer, as a rule for dropping: half of the budget
    are the newest tokens, the other half every `stride`-th token of the text before them.

    Positions are absolute, since a token that has been dropped cannot come back. The budget is
    always used: what the pattern leaves goes to the newest of the other tokens.

    Attributes:
      budget: the newest tokens and the summary together.
      stride: distance of the summary's tokens; if there are too many of them, the oldest go. None
        takes the smallest power of two with which they fit, and doubles it as the text grows.

    """

    stride: int | None = None

    name: ClassVar[str] = "strided"
    keeps: ClassVar[str] = "the newest tokens and every n-th"
    source: ClassVar[str] = "Sparse Transformer, arXiv 1904.10509; as in H2O's tables"

    def __post_init__(self) -> None:
        _check_positive("stride", self.stride)
        super().__post_init__()

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        recent = tokens.budget - tokens.budget // 2
        positions = jnp.maximum(tokens.positions, 0)
        if self.stride is not None:
            level = (positions % self.stride == 0).astype(jnp.int32)
        else:
            # The lowest set bit: the largest power of two that divides the position.
            lowest = (positions & -positions).astype(jnp.float32)
            level = jnp.where(positions == 0, 31, jnp.log2(jnp.maximum(lowest, 1.0)))
        order = level * _AGES - jnp.minimum(tokens.age, _AGES - 1)
        return protect(tokens.age < recent, order.astype(jnp.float32))

    def split(self, budget: int) -> dict[str, int]:
        return {"recent": budget - budget // 2, "summary": budget // 2}


@register
@dataclasses.dataclass(frozen=True)
class Fixed(Policy):
    """The fixed pattern of the Sparse Transformer, as a rule for dropping: the text is cut into
    blocks; kept are the tokens of the newest token's block and the last ones of every other.

    Attributes:
      budget: both together.
      block: tokens of a block; half of the budget if None.
      summary: how many of the last tokens of a block stay; if there are too many of them, the
        oldest go. None takes as many as fit.

    """

    block: int | None = None
    summary: int | None = None

    name: ClassVar[str] = "fixed"
    keeps: ClassVar[str] = "the current block and the ends of earlier ones"
    source: ClassVar[str] = "Sparse Transformer, arXiv 1904.10509; as in H2O's tables"

    def __post_init__(self) -> None:
        _check_positive("block", self.block)
        _check_positive("summary", self.summary)
        if self.block and self.summary and self.summary > self.block:
            raise ValueError(f"summary={self.summary} exceeds the block of {self.block} tokens")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.block or 1

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        length = jnp.maximum(tokens.budget // 2, 1) if self.block is None else self.block
        block, place = tokens.positions // length, tokens.positions % length
        blocks_ago = tokens.newest // length - block
        level = place if self.summary is None else (place >= length - self.summary) * 1
        order = level * _SECOND - jnp.minimum(blocks_ago, _SECOND - 1)
        if self.summary is not None:
            order = level * _AGES - jnp.minimum(tokens.age, _AGES - 1)
        here = blocks_ago == 0
        newer_first = 2.0**25 - jnp.minimum(tokens.age, 2**24).astype(jnp.float32) * 2
        return jnp.where(here, newer_first, order.astype(jnp.float32))


@register
@dataclasses.dataclass(frozen=True)
class TopK(Policy):
    """Reads the tokens of highest attention at each decode step, per query head, and keeps all:
    what knowing the future would be worth, at full memory. The step's own token is always read.

    Attributes:
      budget: how many tokens a step reads.

    """

    name: ClassVar[str] = "topk"
    keeps: ClassVar[str] = "every token; reads the best by current attention"
    frees: ClassVar[str] = "nothing"
    source: ClassVar[str] = "baseline of H2O, arXiv 2306.14048"
    drops: ClassVar[Literal["never"]] = "never"
    selects: ClassVar[Literal["slots"]] = "slots"

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return jnp.zeros(tokens.positions.shape, jnp.float32)

    def select(
        self, tokens: Tokens, queries: Float[Array, "batch kv_heads group dim"]
    ) -> Bool[Array, "batch kv_heads group candidates"]:
        logits = jnp.einsum(
            "bkgd,bksd->bkgs", queries, tokens.turned_keys, preferred_element_type=jnp.float32
        )
        positions = jnp.broadcast_to(tokens.positions[:, :, None], logits.shape)
        best = places(logits, positions) < tokens.budget[:, :, None]
        return best | (positions == tokens.newest[..., None])
