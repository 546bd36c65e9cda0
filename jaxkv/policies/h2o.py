"""H2O: keep the tokens that attention keeps coming back to, and the latest ones."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache import keep_best
from jaxkv.policies.base import Policy, Tokens, protect, register
from jaxkv.statistics import ColumnSums, Statistic, check_group

MODES = ("real_drop", "rolling", "mask", "lm_eval", "flexgen_ring")
LM_EVAL_STATISTICS = ("local", "global")


@register
@dataclasses.dataclass(frozen=True)
class H2O(Policy):
    """Heavy-hitter oracle (Zhang et al. 2023, arXiv 2306.14048).

    A token's score is all the attention it has received, summed over query rows and reduced over
    the query heads of its group. Kept are the `recent` newest tokens and, of the others, the
    `heavy` best by score.

    Attributes:
      budget: heavy and recent together; by default half each, the odd token to recent.
      heavy, recent: the parts, each an int or a fraction of the prompt. Give both (then `budget`
        follows), or one of them beside a budget. 0 is allowed for one of them; the newest token
        always stays.
      mode: as the authors' programs differ:
        "real_drop": the rest is dropped for good, one token at each step.
        "rolling": the same with rolling positions, for texts without end.
        "flexgen_ring": as in their throughput program: at a step the token that leaves the recent
        part enters the heavy part whatever its score, and the lowest of those there before goes.
        "mask": their simulation of generation. Nothing is dropped; a step reads the heavy and the
        recent tokens of its past. As there, recent counts the step's own token, and the token that
        leaves the recent part is hidden for one step before it competes.
        "lm_eval": their scoring of given texts: for `jaxkv.perplexity`, not for generation. All
        rows are computed at once; a row sees the recent + 1 newest and a heavy set.
      group: how the query heads of a KV head are put together: "sum", "mean" or "max" (the paper
        has one query head per KV head).
      statistic: of "lm_eval": "local" (OPT, GPT-NeoX: the heavy set is grown row by row, and who
        has lost never returns) or "global" (LLaMA: column sums over all rows, later ones too).

    """

    budget: int | float | None = None  # type: ignore[assignment]
    heavy: int | float | None = None
    recent: int | float | None = None
    mode: str = "real_drop"
    group: str = "sum"
    statistic: str = "local"

    name: ClassVar[str] = "h2o"
    keeps: ClassVar[str] = "what attention came back to most, and the newest"
    source: ClassVar[str] = "H2O, arXiv 2306.14048"
    tokenwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {self.mode!r}")
        check_group(self.group)
        if self.statistic not in LM_EVAL_STATISTICS:
            raise ValueError(
                f"statistic must be one of {LM_EVAL_STATISTICS}, got {self.statistic!r}"
            )
        if self.mode == "rolling":
            object.__setattr__(self, "positions", "rolling")
        elif self.mode in ("mask", "lm_eval") and self.positions != "original":
            raise ValueError(f"mode {self.mode!r} keeps every token where it is: {self!r}")
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

    @property
    def drops(self) -> Any:  # type: ignore[override]
        return "never" if self.mode in ("mask", "lm_eval") else "always"

    @property
    def selects(self) -> Any:  # type: ignore[override]
        return "slots" if self.mode == "mask" else "all"

    @property
    def simulates(self) -> bool:  # type: ignore[override]
        return self.mode == "lm_eval"

    @property
    def needs_scores(self) -> bool:  # type: ignore[override]
        return not self.simulates

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (ColumnSums(self.group),)

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
        recent = self._recent(tokens.budget, jnp)
        if self.mode == "flexgen_ring" and tokens.step:
            recent = jnp.minimum(recent + 1, tokens.budget)
        return protect(tokens.age < recent, tokens.scores)

    def select(
        self, tokens: Tokens, queries: Float[Array, "batch kv_heads group dim"]
    ) -> Bool[Array, "batch kv_heads one candidates"]:
        """Mode "mask": what a step reads."""
        del queries
        assert tokens.scores is not None
        recent = self._recent(tokens.budget, jnp)
        stored = (tokens.positions >= 0) & (tokens.age > 0)
        competing = stored & (tokens.age > recent)
        heavy = keep_best(
            tokens.scores,
            jnp.where(competing, tokens.positions, -1),
            (tokens.budget - recent)[..., 0],
        )
        few = jnp.sum(stored, -1, keepdims=True) <= tokens.budget
        return (heavy | (tokens.age < jnp.maximum(recent, 1)) | few)[:, :, None]

    def simulate(
        self,
        queries: Float[Array, "batch kv_heads group t dim"],
        keys: Float[Array, "batch kv_heads t dim"],
        values: Float[Array, "batch kv_heads dim t"],
        budget: Int[Array, "batch kv_heads"],
    ) -> Float[Array, "batch kv_heads group t dim"]:
        """Mode "lm_eval": attention of a whole text."""
        t, dim = queries.shape[3:]
        recent = self._recent(budget, jnp)[..., None, None]
        heavy = budget[..., None, None] - recent
        row, column = jnp.arange(t)[:, None], jnp.arange(t)
        logits = jnp.einsum("bkgtd,bksd->bkgts", queries, keys, preferred_element_type=jnp.float32)
        logits = jnp.where(column <= row, logits * dim**-0.5, -jnp.inf)
        weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
        probabilities = weights / jnp.sum(weights, -1, keepdims=True)
        rows = jnp.sum(probabilities, 2)
        if self.statistic == "global":
            positions = jnp.broadcast_to(column, (*budget.shape, t))
            seen = keep_best(jnp.sum(rows, 2), positions, heavy[..., 0, 0])[:, :, None]
        else:
            seen = _grown_row_by_row(rows, heavy[..., 0])
        seen = (seen | (row - column <= recent)) & (column <= row)
        weights = jnp.where(seen[:, :, None], weights, 0.0)
        out = jnp.einsum(
            "bkgts,bkds->bkgtd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return (out / jnp.sum(weights, -1, keepdims=True)).astype(queries.dtype)

    def _recent(self, budget: Any, xp: Any) -> Any:
        """The recent part of a resolved budget: an int32 array of `xp` (numpy or jax.numpy)."""
        if isinstance(self.recent, int):
            return xp.minimum(self.recent, budget)
        if isinstance(self.heavy, int):
            return xp.maximum(budget - self.heavy, 0)
        if self.recent is None and self.heavy is None:
            # A ring of K - 1 beside K heavy slots.
            return budget // 2 if self.mode == "flexgen_ring" else budget - budget // 2
        # Fractions of the prompt; of a resolved budget they are a share.
        heavy, recent = self.heavy or 0.0, self.recent or 0.0
        whole = self.budget or heavy + recent
        share = (whole - heavy if self.recent is None else recent) / whole
        return xp.round(budget.astype(xp.float32) * np.float32(share)).astype(xp.int32)


def _grown_row_by_row(
    rows: Float[Array, "batch kv_heads t t"], heavy: Int[Array, "batch kv_heads one"]
) -> Bool[Array, "batch kv_heads t t"]:
    """Which tokens each row sees as heavy hitters, by the sums of the rows before it."""
    batch, kv_heads, t, _ = rows.shape
    column = jnp.arange(t)

    def grow(carry: Any, i: Array) -> Any:
        sums, inside = carry
        start = i < heavy
        positions = jnp.where(inside & (column < i), column, -1)
        seen = keep_best(sums, positions, heavy[..., 0] - 1) | (column == i)
        seen = jnp.where(start, column < heavy, seen & (heavy > 0))
        # The first rows only add up; what they see is the first tokens.
        sums = jnp.where(seen, sums + rows[:, :, i], 0.0)
        return (sums, jnp.where(start, column < heavy, seen)), seen

    empty = (jnp.zeros((batch, kv_heads, t), jnp.float32), jnp.zeros((batch, kv_heads, t), bool))
    _, seen = lax.scan(grow, empty, jnp.arange(t))
    return jnp.moveaxis(seen, 0, 2)


@register
@dataclasses.dataclass(frozen=True)
class Heavy(Policy):
    """Heavy hitters alone: H2O without its recent part, the paper's ablation. Only the newest
    token is protected.
    """

    name: ClassVar[str] = "heavy"
    keeps: ClassVar[str] = "what attention came back to most"
    source: ClassVar[str] = "H2O, arXiv 2306.14048 (ablation)"
    tokenwise: ClassVar[bool] = True
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
