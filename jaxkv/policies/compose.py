"""Two policies in one: a pattern with heavy hitters, a prompt's policy and decoding's."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import Cache, keep_best
from jaxkv.policies.base import New, Policy, Tokens, protect
from jaxkv.policies.wrapper import Reader, Wrapper
from jaxkv.statistics import ColumnSums, Statistic


@dataclasses.dataclass(frozen=True)
class PlusHeavy(Wrapper):
    """Any policy with heavy hitters, at equal total (the H2O paper's plug-in): the pattern chooses
    as if its budget were smaller, and the places left go to the others' best sums of attention.

    Sorts the tokens at each step, which costs some time.

    Attributes:
      of: the pattern.
      budget: both parts together.
      heavy: the heavy hitters' share of the budget.

    """

    heavy: float = 0.5

    frees: ClassVar[str] = "as what it wraps"
    source: ClassVar[str] = "H2O, arXiv 2306.14048 (plug-in)"

    def __post_init__(self) -> None:
        if not 0 < self.heavy < 1:
            raise ValueError(f"heavy must be a share in (0, 1), got {self.heavy!r}")
        super().__post_init__()
        if self.of.drops != "always" or self.of.needs_scores or self.of.pooled:
            raise ValueError(
                f"plus_heavy adds sums of attention to a pattern; {self.of!r} is none: wrap one "
                "that drops tokens at every step and does not use scores itself"
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.of.name}+heavy"

    @property
    def keeps(self) -> str:  # type: ignore[override]
        return f"{self.of.keeps}, and heavy hitters"

    @property
    def needs_scores(self) -> Literal[True]:  # type: ignore[override]
        return True

    def collect(self, step: bool) -> tuple[Statistic, ...]:
        return (*self.of.collect(step), ColumnSums())

    def remember(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        return tokens.scores + tokens.received[-1]

    def resolve(self, length: int) -> int:
        budget = self.of.resolve(length)
        pattern = budget - round(budget * self.heavy)
        if pattern < self.of.minimum:
            raise ValueError(
                f"of a budget of {budget} tokens heavy={self.heavy} leaves {pattern} to "
                f"{self.of.name}, which needs at least {self.of.minimum} ({self!r})"
            )
        return budget

    def budgets(self, length: int, num_layers: int, kv_heads: int) -> Int[np.ndarray, "l k"]:
        self.resolve(length)  # checks that the pattern gets enough
        return self.of.budgets(length, num_layers, kv_heads)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        heavy = jnp.round(tokens.budget * jnp.float32(self.heavy)).astype(jnp.int32)
        pattern = jnp.maximum(tokens.budget - heavy, 1)
        order = self.of.priority(tokens._replace(budget=pattern))
        order = protect(tokens.age == 0, jnp.broadcast_to(order, tokens.positions.shape))
        chosen = keep_best(order, tokens.positions, pattern[..., 0])
        return protect(chosen, tokens.scores)

    def split(self, budget: int) -> dict[str, int]:
        heavy = round(budget * self.heavy)
        return {**self.of.split(budget - heavy), "heavy": heavy}


def plus_heavy(policy: Policy, heavy: float = 0.5) -> PlusHeavy:
    """`policy` with heavy hitters in a share of its budget; see `PlusHeavy`."""
    return PlusHeavy(policy, heavy=heavy)


@dataclasses.dataclass(frozen=True)
class Compose(Policy):
    """One policy for prompts, another for decode steps: `Compose(prompt=SnapKV(), decode=H2O())`.

    Attributes:
      prompt: what is kept of a prompt, of a chunk of one, or of a later turn.
      decode: what is dropped at decode steps; `Full()` lets the cache grow.
      budget: of both; the prompt's own if None. (`decode` must not have one of its own that
        differs.)

    """

    prompt: Policy = None  # type: ignore[assignment]
    decode: Policy = None  # type: ignore[assignment]
    budget: int | float = dataclasses.field(default=None, kw_only=True)  # type: ignore[assignment]

    source: ClassVar[str] = "composition"

    def __post_init__(self) -> None:
        for part in (self.prompt, self.decode):
            _check_policy(part)
        if not self.prompt.evicts:
            raise ValueError(
                f"the prompt's policy drops nothing, use decode's alone: {self.prompt!r}"
            )
        given: Any = self.budget
        if given is None:
            own = self.decode.budget
            free = not self.decode.evicts or own == type(self.decode)().budget
            if not free and own != self.prompt.budget:
                raise ValueError(
                    f"one cache has one budget, prompt has {self.prompt.budget} and decode {own}: "
                    "give them the same, or budget=... for both"
                )
            object.__setattr__(self, "budget", self.prompt.budget)
        object.__setattr__(self, "prompt", self.prompt.with_budget(self.budget))
        if self.decode.evicts:
            object.__setattr__(self, "decode", self.decode.with_budget(self.budget))
        self._check()
        object.__setattr__(self, "positions", self.prompt.positions)

    def _check(self) -> None:
        prompt, decode = self.prompt, self.decode
        told = f"Compose(prompt={prompt!r}, decode={decode!r})"
        if decode.drops == "prompt":
            raise ValueError(f"{told}: decode's policy drops at prompts only; use decode=Full()")
        for part in (prompt, decode):
            if part.selects != "all" or part.simulates or part.burst:
                raise ValueError(f"{told}: {part.name} cannot be a part of another policy")
        if decode.pooled or decode.afterwards or decode.recent_queries:
            raise ValueError(f"{told}: {decode.name} works from the prompt on; use it alone")
        if prompt.positions != decode.positions and decode.evicts:
            raise ValueError(
                f"{told}: positions are {prompt.positions!r} and {decode.positions!r}; they must "
                "be the same"
            )
        if prompt.needs_traits and decode.needs_traits:
            raise ValueError(f"{told}: both need the one number that a token may carry")
        if (
            prompt.needs_scores
            and decode.needs_scores
            and (prompt.statistics != decode.statistics or prompt.afterwards)
        ):
            raise ValueError(f"{told}: both remember scores, of different kinds")

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.prompt.name}, then {self.decode.name}"

    @property
    def keeps(self) -> str:  # type: ignore[override]
        return f"of prompts {self.prompt.keeps}; then {self.decode.keeps}"

    @property
    def drops(self) -> Any:  # type: ignore[override]
        return "always" if self.decode.evicts else "prompt"

    @property
    def needs_scores(self) -> bool:  # type: ignore[override]
        return self.prompt.needs_scores or self.decode.needs_scores

    @property
    def needs_traits(self) -> bool:  # type: ignore[override]
        return self.prompt.needs_traits or self.decode.needs_traits

    @property
    def pooled(self) -> bool:  # type: ignore[override]
        return self.prompt.pooled

    @property
    def tokenwise(self) -> bool:  # type: ignore[override]
        # Scores of the prompt's policy may go on at steps.
        return self.prompt.tokenwise and self.decode.tokenwise

    @property
    def afterwards(self) -> bool:  # type: ignore[override]
        return self.prompt.afterwards

    @property
    def weighs_layers(self) -> bool:  # type: ignore[override]
        return self.prompt.weighs_layers

    @property
    def by_number(self) -> bool:  # type: ignore[override]
        return self.prompt.by_number or self.decode.by_number

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return max(self.prompt.minimum, self.decode.minimum)

    def collect(self, step: bool) -> tuple[Statistic, ...]:
        later = self.decode.collect(step)
        if step and (self.decode.needs_scores or not self.prompt.needs_scores):
            return later
        # Scores of the prompt's policy go on at steps: a later block is judged by them.
        return (*self.prompt.collect(step), *later)

    def _parts(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """The tokens as the prompt's policy sees them, and as decode's does."""
        start = len(tokens.received) - len(self.decode.collect(tokens.step))
        first, later = tokens.received[:start], tokens.received[start:]
        return tokens._replace(received=first), tokens._replace(received=later)

    def remember(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        prompt, decode = self._parts(tokens)
        if self.decode.needs_scores:
            return self.decode.remember(decode)
        return self.prompt.remember(prompt)

    def trait(self, new: New) -> Float[Array, "batch kv_heads t"]:
        return (self.prompt if self.prompt.needs_traits else self.decode).trait(new)

    def weigh(self, tokens: Tokens) -> Float[Array, "batch kv_heads"]:
        return self.prompt.weigh(tokens)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        prompt, decode = self._parts(tokens)
        return self.decode.priority(decode) if tokens.step else self.prompt.priority(prompt)

    def allot(
        self,
        priority: Float[Array, "batch kv_heads candidates"],
        positions: Int[Array, "batch kv_heads candidates"],
        budget: Int[Array, "batch kv_heads"],
    ) -> Int[Array, "batch kv_heads"]:
        return self.prompt.allot(priority, positions, budget)

    def prepare(self, params: Any) -> Policy:
        prompt, decode = self.prompt.prepare(params), self.decode.prepare(params)
        return dataclasses.replace(self, prompt=prompt, decode=decode)

    def reader(self) -> Policy:
        return Reader(self)

    def questions(self, params: Any, rows: Any) -> Any:
        return self.prompt.questions(params, rows)

    def watcher(self) -> Policy:
        return self.prompt.watcher()

    def share(self, cache: Cache, budgets: Int[np.ndarray, "l b k"]) -> Int[np.ndarray, "l b k"]:
        return self.prompt.share(cache, budgets)

    def resolve(self, length: int) -> int:
        return max(self.prompt.resolve(length), self.decode.resolve(length))

    def budgets(self, length: int, num_layers: int, kv_heads: int) -> Int[np.ndarray, "l k"]:
        return self.prompt.budgets(length, num_layers, kv_heads)

    def split(self, budget: int) -> dict[str, int]:
        return self.prompt.split(budget)


def _check_policy(part: object) -> None:
    """Raises `ValueError` unless `part` is a policy."""
    if not isinstance(part, Policy):
        raise ValueError(f"prompt and decode must be policies, got {part!r}")
