"""The contract of a policy: an order on tokens, and how many of them each layer keeps.

A policy is a frozen dataclass: hashable, and static under `jax.jit`. It says

- `priority(tokens)`: which tokens are worth more. The cache overwrites the token of lowest
  priority; among equals the older one stays. `jnp.inf` protects a token. The newest token is
  always kept, whatever its priority.
- `needs_scores`: whether it needs the accumulated attention of each token.
- `resolve(length)`: how many tokens per KV head a sequence with a prompt of `length` may store,
  and `layer_budgets(budget, num_layers)`: how each layer shares in that.
- `positions`: "original" or "rolling", see `jaxkv.positions`.

A policy of one's own is a subclass that gives `priority`; `register` lends it a name.
"""

import dataclasses
import difflib
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.positions import POSITION_MODES


class Tokens(NamedTuple):
    """What a policy may look at: the tokens that compete for the slots of one layer.

    Candidates are the stored tokens, and after a block of new tokens the block's as well, in no
    particular order. Empty slots have position -1 and are never kept, whatever their priority.
    Keys and values are rotated under "original" positions and unrotated under "rolling".
    """

    positions: Int[Array, "batch kv_heads candidates"]
    #: Attention each token has received so far, summed over query rows and query heads; float32.
    #: None unless the policy sets `needs_scores`.
    scores: Float[Array, "batch kv_heads candidates"] | None
    #: Position of the newest token of each sequence.
    newest: Int[Array, "batch 1 1"]
    #: Tokens that each KV head may store.
    budget: Int[Array, "batch kv_heads 1"]
    keys: Float[Array, "batch kv_heads candidates dim"]
    values: Float[Array, "batch kv_heads dim candidates"]
    #: Which layer this is, counted from 0; an int32 scalar.
    layer: Int[Array, ""]

    @property
    def age(self) -> Int[Array, "batch kv_heads candidates"]:
        """How many tokens ago each candidate was the newest: 0 for the newest itself."""
        return self.newest - self.positions


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all policies.

    Attributes:
      budget: tokens kept per KV head: an int, or a float for the fraction of the sequence's own
        prompt length (rounded to the nearest token, at least 1).

    Raises:
      ValueError: the budget is not an int >= 1 or a float in (0, 1].

    """

    budget: int | float = 0.2

    #: What the policy is called by, what it keeps in a few words, and where the rule is from.
    name: ClassVar[str] = ""
    keeps: ClassVar[str] = ""
    source: ClassVar[str] = ""
    needs_scores: ClassVar[bool] = False
    #: False for policies under which no token is ever dropped, so that slots grow with the text.
    evicts: ClassVar[bool] = True
    #: The fewest tokens the rule can work with.
    minimum: ClassVar[int] = 1
    positions = "original"

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", _plain(self.budget))
        check_budget(self.budget)
        if self.positions not in POSITION_MODES:
            raise ValueError(f"positions must be one of {POSITION_MODES}, got {self.positions!r}")
        if isinstance(self.budget, int):
            self.resolve(0)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        """What each candidate is worth, as float32: higher is kept, `jnp.inf` is protected."""
        raise NotImplementedError(f"{type(self).__name__} must define priority(tokens)")

    def resolve(self, length: int) -> int:
        """Tokens per KV head for a sequence whose prompt has `length` tokens.

        Raises:
          ValueError: fewer than the rule can work with.

        """
        budget, told = self.budget, f"a budget of {self.budget}"
        if not isinstance(budget, int):
            budget = max(1, round(budget * length))
            told = f"a budget of {self.budget} of a prompt of {length} tokens is {budget}, which"
        if budget < self.minimum:
            raise ValueError(
                f"{told} is below what {self.name or type(self).__name__} needs: "
                f"at least {self.minimum} tokens ({self!r})"
            )
        return int(budget)

    def layer_budgets(self, budget: int, num_layers: int) -> list[int]:
        """Tokens per KV head for each layer; they sum to `budget * num_layers`."""
        return [budget] * num_layers

    def split(self, budget: int) -> dict[str, int]:
        """How a resolved budget divides into named parts; for reports."""
        return {"tokens": budget}

    def with_budget(self, budget: int | float) -> Self:
        """The same policy with another budget."""
        return dataclasses.replace(self, budget=budget)


def _plain(budget: Any) -> Any:
    """NumPy's integers as Python's."""
    return int(budget) if isinstance(budget, np.integer) else budget


def check_budget(budget: object) -> None:
    """Raises `ValueError` unless `budget` is an int >= 1 or a float in (0, 1]."""
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 1:
        return
    if isinstance(budget, float) and 0 < budget <= 1:
        return
    raise ValueError(f"budget must be an int >= 1 or a float in (0, 1], got {budget!r}")


def protect(protected: Array, priority: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`priority`, with the tokens marked `protected` above all others."""
    return jnp.where(protected, jnp.inf, priority)


_REGISTRY: dict[str, type[Policy]] = {}


def register(policy: type[Policy]) -> type[Policy]:
    """Class decorator: makes a policy available under its `name`."""
    if not policy.name:
        raise ValueError(f"{policy.__name__} needs a class attribute `name` to be registered")
    _REGISTRY[policy.name] = policy
    return policy


def registered() -> dict[str, type[Policy]]:
    """Name -> policy class, in the order of registration."""
    return dict(_REGISTRY)


def get(policy: "str | Policy", budget: int | float | None = None) -> Policy:
    """A policy from its name or itself, with `budget` in place of its own if one is given.

    Raises:
      ValueError: no policy has that name, or the budget does not suit it.

    """
    if isinstance(policy, str):
        if policy not in _REGISTRY:
            near = difflib.get_close_matches(policy, _REGISTRY, n=1, cutoff=0.5)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown policy {policy!r}{hint}; policies: {', '.join(_REGISTRY)}")
        return _REGISTRY[policy]() if budget is None else _REGISTRY[policy](budget=budget)
    if not isinstance(policy, Policy):
        raise ValueError(f"policy must be a name or a jaxkv.Policy, got {policy!r}")
    return policy if budget is None else policy.with_budget(budget)
