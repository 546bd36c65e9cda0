"""Rules by attention, other than H2O's: by the newest query, by weak rows, by a softened sum."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.policies.base import Policy, Tokens, protect, register
from jaxkv.policies.order import last_rows
from jaxkv.policies.random import uniform
from jaxkv.statistics import ColumnSums, Rows, Statistic


@register
@dataclasses.dataclass(frozen=True)
class TOVA(Policy):
    """Token omission via attention (Oren et al. 2024): what the newest query attends to least goes.

    Attention is averaged over all query heads of a layer, so its KV heads keep the same tokens.
    """

    name: ClassVar[str] = "tova"
    keeps: ClassVar[str] = "what the newest token attends to"
    source: ClassVar[str] = "TOVA, arXiv 2401.06104"

    def collect(self, step: bool) -> tuple[Statistic, ...]:
        return (ColumnSums("mean"),) if step else ()

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        block = not tokens.step
        received = jnp.mean(last_rows(tokens, 1), (2, 3)) if block else tokens.received[0]
        return jnp.broadcast_to(jnp.mean(received, 1, keepdims=True), received.shape)


@dataclasses.dataclass(frozen=True)
class BelowMean(Statistic):
    """In how many rows a key received less than the mean of what the row saw."""

    def of(self, rows: Rows) -> Float[Array, "batch kv_heads keys"]:
        count = jnp.sum(rows.seen, -1, dtype=jnp.float32)
        weak = rows.weights * rows.share[..., None] * count[..., None] < 1
        real = (rows.query_positions >= 0)[:, None, None, :, None]
        return jnp.sum(weak & rows.seen & real, (2, 3), dtype=jnp.float32)


@register
@dataclasses.dataclass(frozen=True)
class Scissorhands(Policy):
    """Importance persists (Liu et al. 2023): tokens that were below the mean of their rows most
    often go. All rows since a token came are counted (the paper counts over a history window).

    Attributes:
      budget: as everywhere; more than `recent`.
      recent: the newest tokens always stay.

    """

    recent: int = 10

    name: ClassVar[str] = "scissorhands"
    keeps: ClassVar[str] = "what is seldom below a row's mean attention"
    source: ClassVar[str] = "Scissorhands, arXiv 2305.17118"
    needs_scores: ClassVar[bool] = True

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.recent + 1

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (BelowMean(),)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        return protect(tokens.age < self.recent, -tokens.scores)

    def split(self, budget: int) -> dict[str, int]:
        return {"important": budget - self.recent, "recent": self.recent}


@dataclasses.dataclass(frozen=True)
class NoisySums(Statistic):
    """Attention with Gumbel noise on the logits and a temperature that grows with the text."""

    seed: int = 0
    start: float = 1.0
    end: float = 2.0
    steps: int = 1024

    def of(self, rows: Rows) -> Float[Array, "batch kv_heads keys"]:
        draw = jnp.clip(uniform(rows.key_positions, rows.layer, self.seed), 1e-7, 1 - 1e-7)
        noise = -jnp.log(-jnp.log(draw))
        done = jnp.minimum(rows.query_positions / self.steps, 1.0)
        heat = (self.start + (self.end - self.start) * done)[:, None, None, :, None]
        logits = jnp.where(rows.seen, (rows.logits + noise[:, :, None, None]) / heat, -jnp.inf)
        highest = jnp.max(logits, -1, keepdims=True)
        weights = jnp.exp(logits - jnp.where(jnp.isfinite(highest), highest, 0.0))
        share = 1 / jnp.maximum(jnp.sum(weights, -1), 1e-30)
        real = (rows.query_positions >= 0)[:, None, None]
        share = jnp.where(real, share, 0.0)
        return jnp.einsum("bkgr,bkgrs->bks", share, weights, precision="highest")


@register
@dataclasses.dataclass(frozen=True)
class Keyformer(Policy):
    """H2O's sums of a softened attention (Adnan et al. 2024): Gumbel noise on the logits and a
    temperature above 1 make up for what the dropped tokens would have taken.

    As in the paper the noise belongs to a token; here it is drawn once per token and head (their
    program draws anew for each row), and the temperature follows the position.

    Attributes:
      budget: key tokens and recent ones together.
      recent: share of the newest tokens in the budget.
      start, end, steps: the temperature grows from `start` to `end` over the first `steps` tokens.
      seed: of the noise.

    """

    recent: float = 0.3
    start: float = 1.0
    end: float = 2.0
    steps: int = 1024
    seed: int = 0

    name: ClassVar[str] = "keyformer"
    keeps: ClassVar[str] = "heavy hitters of a softened attention, and the newest"
    source: ClassVar[str] = "Keyformer, arXiv 2403.09054"
    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.recent <= 1:
            raise ValueError(f"recent must be a share in [0, 1], got {self.recent!r}")
        if self.start <= 0 or self.end <= 0 or self.steps < 1:
            raise ValueError(f"start, end and steps must be positive: {self!r}")
        super().__post_init__()

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (NoisySums(self.seed, self.start, self.end, self.steps),)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        recent = jnp.round(tokens.budget * jnp.float32(self.recent))
        return protect(tokens.age < recent, tokens.scores)

    def split(self, budget: int) -> dict[str, int]:
        recent = round(budget * self.recent)
        return {"key": budget - recent, "recent": recent}
