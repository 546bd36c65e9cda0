"""Policies made of policies: what is common to all. A wrapper hands on what it does not change, so
that wrappers nest: `AdaKV(CriticalKV(ExpectedAttention(use_value_norm=False)), budget=0.2)`.
"""

import dataclasses
from typing import Any, Literal

import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import Cache
from jaxkv.policies.base import New, Policy, Tokens
from jaxkv.statistics import Statistic


@dataclasses.dataclass(frozen=True)
class Wrapper(Policy):
    """A policy around another, `of`. There is one budget: `budget`, if given, replaces the inner
    policy's.
    """

    of: Policy = None  # type: ignore[assignment]
    budget: int | float = dataclasses.field(default=None, kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not isinstance(self.of, Policy):
            raise ValueError(f"{type(self).__name__} wraps a jaxkv.Policy, got {self.of!r}")
        if self.budget is not None:
            object.__setattr__(self, "of", self.of.with_budget(self.budget))
        object.__setattr__(self, "budget", self.of.budget)
        if self.positions != "original" and self.positions != self.of.positions:
            moved = dataclasses.replace(self.of, positions=self.positions)
            object.__setattr__(self, "of", moved)
        object.__setattr__(self, "positions", self.of.positions)
        if self.of.simulates or self.of.selects != "all":
            raise ValueError(
                f"{type(self).__name__} cannot be combined with {self.of!r}, which stores every "
                "token and reads some of them"
            )

    def with_budget(self, budget: int | float) -> "Policy":
        # Sets the wrapped policy's as well.
        return dataclasses.replace(self, budget=budget)

    def limit(self, budget: Any) -> Any:
        return self.of.limit(budget)

    @property
    def max_distance(self) -> int | None:  # type: ignore[override]
        return self.of.max_distance

    @property
    def drops(self) -> Any:  # type: ignore[override]
        return self.of.drops

    @property
    def needs_scores(self) -> bool:  # type: ignore[override]
        return self.of.needs_scores

    @property
    def needs_traits(self) -> bool:  # type: ignore[override]
        return self.of.needs_traits

    @property
    def pooled(self) -> bool:  # type: ignore[override]
        return self.of.pooled

    @property
    def afterwards(self) -> bool:  # type: ignore[override]
        return self.of.afterwards

    @property
    def weighs_layers(self) -> bool:  # type: ignore[override]
        return self.of.weighs_layers

    @property
    def by_number(self) -> bool:  # type: ignore[override]
        return self.of.by_number

    @property
    def recent_queries(self) -> int:  # type: ignore[override]
        return self.of.recent_queries

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.of.minimum

    @property
    def burst(self) -> int:  # type: ignore[override]
        return self.of.burst

    def collect(self, step: bool) -> tuple[Statistic, ...]:
        return self.of.collect(step)

    def remember(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return self.of.remember(tokens)

    def trait(self, new: New) -> Float[Array, "batch kv_heads t"]:
        return self.of.trait(new)

    def weigh(self, tokens: Tokens) -> Float[Array, "batch kv_heads"]:
        return self.of.weigh(tokens)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        return self.of.priority(tokens)

    def allot(
        self,
        priority: Float[Array, "batch kv_heads candidates"],
        positions: Int[Array, "batch kv_heads candidates"],
        budget: Int[Array, "batch kv_heads"],
    ) -> Int[Array, "batch kv_heads"]:
        return self.of.allot(priority, positions, budget)

    def prepare(self, params: Any) -> Policy:
        return dataclasses.replace(self, of=self.of.prepare(params))

    def reader(self) -> Policy:
        return Reader(self)

    def questions(self, params: Any, rows: Any) -> Any:
        return self.of.questions(params, rows)

    def watcher(self) -> Policy:
        return self.of.watcher()

    def share(self, cache: Cache, budgets: Int[np.ndarray, "l b k"]) -> Int[np.ndarray, "l b k"]:
        return self.of.share(cache, budgets)

    def resolve(self, length: int) -> int:
        return self.of.resolve(length)

    def budgets(self, length: int, num_layers: int, kv_heads: int) -> Int[np.ndarray, "l k"]:
        return self.of.budgets(length, num_layers, kv_heads)

    def split(self, budget: int) -> dict[str, int]:
        return self.of.split(budget)


@dataclasses.dataclass(frozen=True)
class Reader(Wrapper):
    """Reads a prompt for a policy that cuts it afterwards: keeps every token, and the numbers that
    the policy will judge by.
    """

    @property
    def drops(self) -> Literal["never"]:  # type: ignore[override]
        return "never"

    @property
    def pooled(self) -> Literal[False]:  # type: ignore[override]
        return False

    @property
    def afterwards(self) -> Literal[False]:  # type: ignore[override]
        return False

    def budgets(self, length: int, num_layers: int, kv_heads: int) -> Int[np.ndarray, "l k"]:
        return Policy.budgets(self, length, num_layers, kv_heads)
