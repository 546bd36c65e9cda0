"""SnapKV and what builds on its window of observation: PyramidKV and CAKE."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import Cache
from jaxkv.policies.base import Policy, Tokens, protect, register
from jaxkv.policies.order import in_text_order, last_rows, pooled
from jaxkv.policies.wrapper import Reader


@register
@dataclasses.dataclass(frozen=True)
class SnapKV(Policy):
    """What the last tokens of the prompt look at stays (Li et al. 2024).

    The prompt is cut when it has been read; then the cache grows with every new token. A chunk of
    a prompt, or a further turn, is cut in the same way. Good when the prompt ends with a question.

    Attributes:
      budget: tokens kept of a prompt; more than `window`.
      window: this many of the last tokens ask, and stay.
      kernel, pooling: scores are averaged ("avg") or the highest taken ("max") over so many
        neighbours (an odd number), so that tokens stay with their surroundings.

    """

    window: int = 32
    kernel: int = 5
    pooling: str = "avg"

    name: ClassVar[str] = "snapkv"
    keeps: ClassVar[str] = "what the end of the prompt looks at"
    frees: ClassVar[str] = "of a prompt all but the budget"
    source: ClassVar[str] = "SnapKV, arXiv 2404.14469"
    drops: ClassVar[Literal["prompt"]] = "prompt"

    def __post_init__(self) -> None:
        check_window(self.window, self.kernel)
        if self.pooling not in ("avg", "max"):
            raise ValueError(f"pooling must be 'avg' or 'max', got {self.pooling!r}")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.window + 1

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        # The group is averaged before the pooling, rows are summed.
        received = jnp.mean(jnp.sum(last_rows(tokens, self.window), 3), 2)
        return pooled_before_window(received, tokens, self.window, self.kernel, self.pooling)

    def split(self, budget: int) -> dict[str, int]:
        return {"observed": budget - self.window, "window": self.window}


def check_window(window: int, kernel: int) -> None:
    """Raises `ValueError` for a window or a kernel that cannot be."""
    if type(window) is not int or window < 1:
        raise ValueError(f"window must be an int >= 1, got {window!r}")
    if type(kernel) is not int or kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel must be an odd int >= 1, got {kernel!r}")


def pooled_before_window(
    received: Float[Array, "batch kv_heads candidates"],
    tokens: Tokens,
    window: int,
    kernel: int,
    pooling: str,
) -> Float[Array, "batch kv_heads candidates"]:
    """Scores averaged over neighbours; the window's tokens take no part in that and stay."""
    inside = tokens.age < window
    edge = 0.0 if pooling == "avg" else -jnp.inf
    outside = jnp.where(inside | (tokens.positions < 0), edge, received)
    smooth = in_text_order(lambda x: pooled(x, kernel, pooling), outside, tokens.positions)
    return protect(inside, smooth)


@register
@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with budgets that fall from layer to layer (Cai et al. 2024): deep layers look at few
    tokens. Over the layers the budgets sum to what was asked for.

    Attributes:
      budget: of a layer, on average; more than `window`.
      window, kernel, pooling: as SnapKV.
      beta: the last layer's share is about 1/beta of the average (beside the window).

    """

    beta: int = 20

    name: ClassVar[str] = "pyramidkv"
    keeps: ClassVar[str] = "as snapkv; more in the first layers, less in the last"
    source: ClassVar[str] = "PyramidKV, arXiv 2406.02069"

    def __post_init__(self) -> None:
        if type(self.beta) is not int or self.beta < 1:
            raise ValueError(f"beta must be an int >= 1, got {self.beta!r}")
        super().__post_init__()

    def budgets(self, length: int, num_layers: int, kv_heads: int) -> Int[np.ndarray, "l k"]:
        budget = self.resolve(length)
        shared = budget - self.window
        # All layers alike where the prompt fits, or nearly.
        if num_layers == 1 or length < max(2 * shared, budget):
            return np.full((num_layers, kv_heads), budget)
        low = shared // self.beta
        high = 2 * shared - low
        if high >= length - self.window:
            high = length - self.window
            low = 2 * shared - high
        # In parts of num_layers - 1, so that everything is whole numbers.
        parts = (self.window + high) * (num_layers - 1) - np.arange(num_layers) * (high - low)
        layers, fractions = np.divmod(parts, num_layers - 1)
        missing = budget * num_layers - layers.sum()
        layers[np.argsort(-fractions, kind="stable")[:missing]] += 1
        return np.repeat(layers[:, None], kv_heads, 1)


@register
@dataclasses.dataclass(frozen=True)
class CAKE(SnapKV):
    """Layer budgets by how widely and how unsteadily a layer attends (Qin et al. 2025).

    When the prompt has been read, layers whose last `window` rows spread their attention (entropy)
    and move it (variance) get more of the budget; in each layer tokens stay by the mean and the
    variance of what these rows give them. Until then every token is kept. The sizes of the caches
    depend on the text, so a program is compiled for each prompt; then the cache grows.

    Attributes:
      budget: of a layer, on average; more than `window`.
      window, kernel: as SnapKV.
      gamma: weight of the variance.
      tau1, tau2: a layer's preference is entropy^(1/tau1) * variance^(1/tau2).

    """

    gamma: float = 200.0
    tau1: float = 1.0
    tau2: float = 1.0

    name: ClassVar[str] = "cake"
    keeps: ClassVar[str] = "as snapkv, and what moves; more in layers that look around"
    source: ClassVar[str] = "CAKE, arXiv 2503.12491"
    afterwards: ClassVar[bool] = True
    needs_scores: ClassVar[bool] = True
    weighs_layers: ClassVar[bool] = True

    @property
    def statistics(self) -> tuple[()]:
        return ()

    def remember(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        if tokens.step:
            return tokens.scores
        mean, variance = self._observe(tokens)
        return jnp.mean(mean + self.gamma * variance, 2)

    def reader(self) -> Policy:
        return Reader(self)

    def weigh(self, tokens: Tokens) -> Float[Array, "batch kv_heads"]:
        rows = last_rows(tokens, self.window)
        before = ((tokens.positions >= 0) & (tokens.age >= self.window))[:, :, None]
        entropy = -jnp.sum(
            jnp.where(before, jnp.sum(rows * jnp.log(rows + 1e-10), 3), 0.0), (1, 2, 3)
        )
        shift = jnp.sum(jnp.where(before, self._observe(tokens)[1], 0.0), (1, 2, 3))
        worth = entropy ** (1 / self.tau1) * shift ** (1 / self.tau2)
        return jnp.broadcast_to(worth[:, None], tokens.budget.shape[:2])

    def _observe(self, tokens: Tokens) -> tuple[Array, Array]:
        """Mean and unbiased variance over the window's rows, per query head."""
        rows = last_rows(tokens, self.window)
        count = jnp.minimum(jnp.sum(tokens.new.positions >= 0, 1), self.window)
        count = jnp.maximum(count, 1).astype(jnp.float32)[:, None, None, None]
        mean = jnp.sum(rows, 3) / count
        there = (jnp.arange(self.window) >= self.window - count)[..., None]
        apart = jnp.where(there, rows - mean[:, :, :, None], 0.0)
        return mean, jnp.sum(apart**2, 3) / jnp.maximum(count - 1, 1.0)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        return pooled_before_window(tokens.scores, tokens, self.window, self.kernel, self.pooling)

    def share(self, cache: Cache, budgets: Int[np.ndarray, "l b k"]) -> Int[np.ndarray, "l b k"]:
        weights = np.stack([np.asarray(layer.weight)[:, 0] for layer in cache.layers])
        lengths = np.asarray(cache.length)
        shared = np.empty_like(budgets)
        for row, length in enumerate(lengths):
            budget = int(budgets[0, row, 0])
            layers = layer_shares(weights[:, row], budget, self.window, int(length))
            shared[:, row] = layers[:, None]
        return shared


def layer_shares(
    preferences: Float[np.ndarray, " layers"], budget: int, window: int, length: int
) -> Int[np.ndarray, " layers"]:
    """Budgets of layers by their preferences, that sum to `budget` each; none exceeds `length`,
    and what one cannot use goes evenly to the others.
    """
    layers = len(preferences)
    window = min(window, budget)
    total, cap = (budget - window) * layers, max(length - window, 0)
    weights = np.asarray(preferences, np.float64)
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(layers, 1 / layers)
    shares = (weights * total).astype(int)

    def spread(amount: int) -> None:
        below = np.flatnonzero(shares < cap)
        if len(below):
            shares[below] += amount // len(below)
            shares[below[: amount % len(below)]] += 1

    def cut() -> int:
        above = int(np.maximum(shares - cap, 0).sum())
        np.minimum(shares, cap, out=shares)
        return above

    spread(cut())
    spread(total - int(shares.sum()))
    while cut() and shares.min() < cap:
        spread(min(total, cap * layers) - int(shares.sum()))
    return window + shares
