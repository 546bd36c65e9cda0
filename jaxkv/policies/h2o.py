"""H2O: keep the tokens that attention keeps coming back to, and the latest ones."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv.policies.base import Policy, Tokens, protect, register

MODES = ("real_drop",)


@register
@dataclasses.dataclass(frozen=True)
class H2O(Policy):
    """Heavy-hitter oracle (Zhang et al. 2023, arXiv 2306.14048).

    A token's score is all the attention it has received, summed over query rows and over the
    query heads of its group. Kept are the `recent` newest tokens and, of the others, the `heavy`
    best by score. In mode "real_drop" the rest is dropped for good, one token at each step, and
    keys keep their original positions.

    Attributes:
      budget: heavy and recent together; by default half each, the odd token to recent.
      heavy, recent: the parts, each an int or a fraction of the prompt. Give both (then `budget`
        follows), or one of them beside a budget. 0 is allowed for one of them; the newest token
        always stays.
      mode: "real_drop".

    """

    budget: int | float | None = None  # type: ignore[assignment]
    heavy: int | float | None = None
    recent: int | float | None = None
    mode: str = "real_drop"

    name: ClassVar[str] = "h2o"
    keeps: ClassVar[str] = "what attention came back to most, and the newest"
    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {self.mode!r}")
        parts = {"heavy": self.heavy, "recent": self.recent}
        given = {name: part for name, part in parts.items() if part is not None}
        for name, part in given.items():
            _check_part(name, part)
        if len(given) == 2:
            if self.budget is not None:
                raise ValueError(f"give a budget or both of its parts, not all three: {self!r}")
            if not any(given.values()):
                raise ValueError("heavy and recent are both 0: nothing would be kept")
            return
        if self.budget is None:
            object.__setattr__(self, "budget", 0.2)
        super().__post_init__()
        for name, part in given.items():
            if isinstance(part, float) and isinstance(self.budget, int):
                raise ValueError(
                    f"{name}={part} is a fraction of the prompt and budget={self.budget} a number "
                    "of tokens: give both as fractions or both as numbers"
                )
            if type(part) is type(self.budget) and part > self.budget:
                raise ValueError(f"{name}={part} exceeds the budget of {self.budget}")

    def resolve(self, length: int) -> int:
        if self.budget is not None:
            budget = super().resolve(length)
            for name in ("heavy", "recent"):
                part = getattr(self, name)
                if isinstance(part, int) and part > budget:
                    raise ValueError(
                        f"{name}={part} exceeds the budget of {budget} tokens, which is "
                        f"{self.budget} of a prompt of {length} tokens"
                    )
            return budget
        parts = (self.heavy or 0, self.recent or 0)
        return max(1, sum(p if isinstance(p, int) else round(p * length) for p in parts))

    def split(self, budget: int) -> dict[str, int]:
        recent = int(self._recent(np.int32(budget), np))
        return {"heavy": budget - recent, "recent": recent}

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        return protect(tokens.age < self._recent(tokens.budget, jnp), tokens.scores)

    def _recent(self, budget: Any, xp: Any) -> Any:
        """The recent part of a resolved budget: an int32 array of `xp` (numpy or jax.numpy)."""
        if isinstance(self.recent, int):
            return xp.minimum(self.recent, budget)
        if isinstance(self.heavy, int):
            return xp.maximum(budget - self.heavy, 0)
        if self.recent is None and self.heavy is None:
            return budget - budget // 2
        # Fractions of the prompt; of a resolved budget they are a share.
        heavy, recent = self.heavy or 0.0, self.recent or 0.0
        whole = self.budget or heavy + recent
        share = (whole - heavy if self.recent is None else recent) / whole
        return xp.round(budget.astype(xp.float32) * np.float32(share)).astype(xp.int32)


@register
@dataclasses.dataclass(frozen=True)
class Heavy(Policy):
    """Heavy hitters alone: H2O without its recent part, the paper's ablation. Only the newest
    token is protected.
    """

    name: ClassVar[str] = "heavy"
    keeps: ClassVar[str] = "what attention came back to most"
    source: ClassVar[str] = "H2O, arXiv 2306.14048 (ablation)"
    needs_scores: ClassVar[bool] = True

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        return tokens.scores

    def split(self, budget: int) -> dict[str, int]:
        return {"heavy": budget - 1, "recent": 1}


def _check_part(name: str, part: object) -> None:
    """Raises `ValueError` unless `part` is an int >= 0 or a float in [0, 1]."""
    whole = isinstance(part, int) and not isinstance(part, bool) and part >= 0
    if not (whole or (isinstance(part, float) and 0 <= part <= 1)):
        raise ValueError(f"{name} must be an int >= 0 or a float in [0, 1], got {part!r}")
