"""R-KV: for long reasoning, what matters and has not been said yet."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.cache import places
from jaxkv.policies.base import Policy, Tokens, protect, register
from jaxkv.policies.order import attention, in_text_order, pooled
from jaxkv.policies.snapkv import check_window


@register
@dataclasses.dataclass(frozen=True)
class RKV(Policy):
    """Importance minus redundancy (Cai et al. 2025), for models that write long chains of thought
    and repeat themselves.

    Importance is what the last `window` queries give to the tokens before them; redundancy is how
    similar a token's key is to the others, the newest of similar ones being spared. Decoding lets
    the cache grow by `burst` tokens and then cuts it to the budget.

    Attributes:
      budget: tokens kept by a cut; more than `window`.
      window: the newest tokens ask, and stay.
      weight: of importance; redundancy has 1 - weight.
      burst: tokens between two cuts.
      kernel: importance is the highest over so many neighbours (an odd number).
      threshold: keys with a higher cosine are similar.

    """

    window: int = 8
    weight: float = 0.07
    burst: int = 128  # type: ignore[misc]
    kernel: int = 7
    threshold: float = 0.5

    name: ClassVar[str] = "r_kv"
    keeps: ClassVar[str] = "what matters and is not repeated later"
    frees: ClassVar[str] = "all but the budget and a burst"
    source: ClassVar[str] = "R-KV, arXiv 2505.24133"
    drops: ClassVar[Literal["bursts"]] = "bursts"

    def __post_init__(self) -> None:
        check_window(self.window, self.kernel)
        if type(self.burst) is not int or self.burst < 1:
            raise ValueError(f"burst must be an int >= 1, got {self.burst!r}")
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must be in [0, 1], got {self.weight!r}")
        if self.positions != "original":
            raise ValueError(f"{self.name} remembers queries at original positions: {self!r}")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.window + 1

    @property
    def recent_queries(self) -> int:  # type: ignore[override]
        return self.window

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.queries is not None
        inside = tokens.age < self.window
        before = jnp.where(inside, -1, tokens.positions)
        rows = tokens.newest[:, 0] - self.window + 1 + jnp.arange(self.window)
        rows = jnp.where(rows >= 0, rows, -1)
        count = jnp.sum(rows >= 0, -1)[:, None, None]
        given = attention(tokens, tokens.queries, rows[:, None], before, over_group=True)
        importance = jnp.sum(given[:, :, 0], 2) / count
        importance = jnp.where(before < 0, -jnp.inf, importance)
        importance = in_text_order(
            lambda x: pooled(x, self.kernel, "max"), importance, tokens.positions
        )
        redundancy = jnp.where(tokens.positions < 0, -jnp.inf, self._similarity(tokens))
        redundancy = jax.nn.softmax(redundancy, -1)
        score = self.weight * importance - (1 - self.weight) * redundancy
        return protect(inside, score)

    def _similarity(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        """Mean cosine of each key with the others; in each row the newest similar key is spared
        (and where there is none, the oldest key, as in the authors' program).
        """
        keys = tokens.turned_keys.astype(jnp.float32)
        unit = keys / (jnp.linalg.norm(keys, axis=-1, keepdims=True) + 1e-8)
        there = tokens.positions >= 0
        age_order = places(-tokens.positions.astype(jnp.float32), tokens.positions)
        size = jnp.sum(there, -1, keepdims=True)

        def row(i: Array) -> Array:
            cosine = jnp.einsum("bksd,bkd->bks", unit, unit[:, :, i], precision="highest")
            index = jnp.arange(unit.shape[2])
            cosine = jnp.where((index == i) | ~there, 0.0, cosine)
            similar = cosine > self.threshold
            newest = jnp.max(jnp.where(similar, age_order, 0), -1, keepdims=True)
            cosine = jnp.where(age_order == newest, 0.0, cosine)
            return jnp.where(there[:, :, i, None], cosine, 0.0)

        def add(i: Array, total: Array) -> Array:
            return total + row(i)

        total = jax.lax.fori_loop(0, unit.shape[2], add, jnp.zeros(there.shape, jnp.float32))
        return total / size

    def split(self, budget: int) -> dict[str, int]:
        return {"chosen": budget - self.window, "window": self.window}
