"""Budgets that differ by head: shared by need (AdaKV), or by what a head is for (DuoAttention)."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import UNBOUNDED, keep_best, places
from jaxkv.policies.base import Policy, Tokens, protect, register
from jaxkv.policies.expected_attention import ExpectedAttention
from jaxkv.policies.order import part_of
from jaxkv.policies.wrapper import Wrapper


@register
@dataclasses.dataclass(frozen=True)
class AdaKV(Wrapper):
    """Heads of a layer share its budget by need (Feng et al. 2024): the best of all their tokens
    stay, whichever head they belong to, and no head has less than `floor` of the average.

    The memory of what is dropped is freed: the slots of a layer are one pool in which each head
    owns as many as it needs (see `jaxkv.pool`), so a cache takes what a uniform one takes. Shares
    are decided when a block is read; decode steps keep them.

    Attributes:
      of: whose order counts; scores are compared over heads as they are.
      budget: tokens per KV head, on average.
      floor: share of the budget that every head has.

    """

    of: Policy = dataclasses.field(default_factory=ExpectedAttention)
    floor: float = 0.2

    name: ClassVar[str] = "adakv"
    keeps: ClassVar[str] = "the best tokens of all heads of a layer together"
    frees: ClassVar[str] = "as what it wraps"
    source: ClassVar[str] = "AdaKV, arXiv 2407.11550"

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be a share in [0, 1], got {self.floor!r}")
        super().__post_init__()
        if self.of.pooled:
            raise ValueError(f"{self.of!r} shares budgets over heads already")
        if not self.of.evicts:
            raise ValueError(f"{self.of!r} keeps every token: there is no budget to share")

    @property
    def pooled(self) -> Literal[True]:  # type: ignore[override]
        return True

    @property
    def tokenwise(self) -> bool:  # type: ignore[override]
        return self.of.tokenwise

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        if not tokens.step:
            # Shares are made anew: what heads got from earlier blocks does not count.
            average = jnp.sum(tokens.budget, 1, keepdims=True) // tokens.budget.shape[1]
            tokens = tokens._replace(budget=jnp.broadcast_to(average, tokens.budget.shape))
        return self.of.priority(tokens)

    def allot(
        self,
        priority: Float[Array, "batch kv_heads candidates"],
        positions: Int[Array, "batch kv_heads candidates"],
        budget: Int[Array, "batch kv_heads"],
    ) -> Int[Array, "batch kv_heads"]:
        batch, kv_heads, count = positions.shape
        there = positions >= 0
        total = jnp.sum(budget, -1, keepdims=True)
        # Every head's own best come first, then whichever are best.
        least = jnp.maximum(part_of(total // kv_heads, self.floor), 1)
        first = places(priority, positions) < least[..., None]
        # Of equals the older, then the lower head: heads lie next to each other.
        flat = (jnp.swapaxes(x, 1, 2).reshape(batch, 1, -1) for x in (first, priority, positions))
        sure, worth, where = flat
        worth = jnp.where(sure, jnp.inf, jnp.minimum(worth, jnp.finfo(jnp.float32).max))
        best = keep_best(worth, where, total)
        kept = jnp.sum(best.reshape(batch, count, kv_heads), 1, dtype=jnp.int32)
        # While all tokens fit, what is left over is shared evenly.
        kept = jnp.minimum(kept, jnp.sum(there, -1))
        left = total - jnp.sum(kept, -1, keepdims=True)
        head = jnp.arange(kv_heads)
        return kept + left // kv_heads + (head < left % kv_heads)


@register
@dataclasses.dataclass(frozen=True)
class DuoAttention(Policy):
    """Retrieval heads keep every token, streaming heads the first and the newest (Xiao et al.
    2024). Which are which is given; `jaxkv.analyze.retrieval_heads` finds out.

    Heads of a layer own parts of one pool of slots (see `jaxkv.pool`), so what streaming heads
    drop is freed.

    Attributes:
      budget: of the streaming heads: sinks and newest tokens together.
      retrieval: for each layer, for each of its KV heads, whether it keeps everything.
      sinks: how many of the first tokens always stay.

    """

    budget: int | float = 320
    retrieval: Sequence[Sequence[bool]] = ()
    sinks: int = 64

    name: ClassVar[str] = "duo_attention"
    keeps: ClassVar[str] = "every token in heads that look back; first and newest in the others"
    frees: ClassVar[str] = "what the other heads drop"
    source: ClassVar[str] = "DuoAttention, arXiv 2410.10819"
    tokenwise: ClassVar[bool] = True
    pooled: ClassVar[bool] = True
    by_number: ClassVar[bool] = True

    def __post_init__(self) -> None:
        try:
            pattern = np.array(self.retrieval or np.zeros((0, 0)), bool)
        except ValueError:  # rows of different lengths
            pattern = np.zeros(0, bool)
        if pattern.ndim != 2:
            raise ValueError(
                "retrieval must be a table of booleans, one row per layer and one column per KV "
                f"head, got {self.retrieval!r}"
            )
        object.__setattr__(self, "retrieval", tuple(tuple(map(bool, row)) for row in pattern))
        if type(self.sinks) is not int or self.sinks < 0:
            raise ValueError(f"sinks must be an int >= 0, got {self.sinks!r}")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.sinks + 1

    def budgets(self, length: int, num_layers: int, kv_heads: int) -> Int[np.ndarray, "l k"]:
        if not self.retrieval:
            raise ValueError(
                "duo_attention needs to know which heads retrieve: "
                "jaxkv.DuoAttention(retrieval=jaxkv.analyze.retrieval_heads(params))"
            )
        pattern = np.asarray(self.retrieval)
        if pattern.shape != (num_layers, kv_heads):
            raise ValueError(
                f"retrieval is for {pattern.shape[0]} layers of {pattern.shape[1]} KV heads, the "
                f"model has {num_layers} layers of {kv_heads}"
            )
        return np.where(pattern, UNBOUNDED, self.resolve(length))

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return protect(tokens.positions < self.sinks, -tokens.age.astype(jnp.float32))

    def split(self, budget: int) -> dict[str, int]:
        return {"tokens": budget}
