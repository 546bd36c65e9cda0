"""The best rule found so far: heavy hitters by rate, and budgets by what each head needs."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.policies.base import Policy, Tokens, protect, register

LEVELS = ("heads", "layers")
Profile = tuple[tuple[float, ...], ...]


@register
@dataclasses.dataclass(frozen=True)
class Best(Policy):
    """H2O with two changes.

    *Budgets by need.* Heads differ far more than tokens do: some lose nothing with a tenth of the
    slots, others nearly everything. A profile, measured once per model, gives each KV head of each
    layer its share of the budget; all shares together are the budget. It is measured by replaying
    a text under this rule, head by head, while the model itself runs on full attention: the error
    of a head's contribution to the hidden state, relative to that state, falls roughly with the
    square of its budget, so shares in proportion to the root of the error at equal budgets make
    the sum of errors small. This is most of the gain. `jaxkv.analyze.fit_profile` measures; the
    package brings the profile of SmolLM2-135M. For other models, without one, budgets are equal.

    *Rates instead of sums.* A token's score is the attention it has received per row that could
    see it: with sums old tokens win by age alone. With equal budgets this made no difference; with
    budgets by need it does. The newest half of the budget stays, as in H2O.

    What was found on the way: a short recent part, values' norms and roots of probabilities, which
    help on the first tokens of WikiText-2, hurt on every other text; powers, maxima, decay and
    sinks change little; merging evicted tokens into their neighbours is far worse than dropping.

    Attributes:
      budget: tokens per KV head, on average over heads and layers.
      recent: share of the newest tokens in a head's budget.
      level: "heads" or "layers": who has a share of its own. With "layers" the heads of a layer
        share alike: less is gained, and a decode step costs what H2O's does (heads that differ lie
        in one pool of slots, see `jaxkv.pool`, which costs a fifth more on CPU).
      profile: relative budgets, one row per layer, one number per KV head; their mean is 1. None
        takes the model's own, if the package has it.

    """

    recent: float = 0.5
    level: str = "heads"
    profile: Sequence[Sequence[float]] | None = None

    name: ClassVar[str] = "best"
    keeps: ClassVar[str] = "what attention comes back to most often; more in heads that need it"
    source: ClassVar[str] = "jaxkv, after H2O"
    tokenwise: ClassVar[bool] = True
    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.recent <= 1:
            raise ValueError(f"recent must be a share in [0, 1], got {self.recent!r}")
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {self.level!r}")
        if self.profile is not None:
            object.__setattr__(self, "profile", _checked(self.profile))
        super().__post_init__()

    @property
    def pooled(self) -> bool:  # type: ignore[override]
        return self.profile is not None and self.level == "heads"

    @property
    def by_number(self) -> bool:  # type: ignore[override]
        # A profile may come with the model.
        return self.level == "heads"

    def prepare(self, params: Any) -> Policy:
        if self.profile is not None:
            return self
        return dataclasses.replace(self, profile=known_profile(params))

    def budgets(self, length: int, num_layers: int, kv_heads: int) -> Int[np.ndarray, "l k"]:
        budget = self.resolve(length)
        if self.profile is None:
            return np.full((num_layers, kv_heads), budget)
        profile = np.array(self.profile)
        if profile.shape != (num_layers, kv_heads):
            raise ValueError(
                f"the profile is for {profile.shape[0]} layers of {profile.shape[1]} KV heads, the "
                f"model has {num_layers} layers of {kv_heads}"
            )
        if self.level == "layers":
            # Shares are roots of errors, and it is errors that add up.
            layer = np.sqrt(np.mean(profile**2, 1, keepdims=True))
            sizes = share_out(layer, budget)
            return np.repeat(sizes, kv_heads, 1)
        return share_out(profile, budget)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        recent = jnp.ceil(tokens.budget * jnp.float32(self.recent))
        rate = tokens.scores / (tokens.age + 1).astype(jnp.float32)
        return protect(tokens.age < recent, rate)

    def split(self, budget: int) -> dict[str, int]:
        recent = int(np.ceil(np.float32(budget) * np.float32(self.recent)))
        return {"heavy": budget - recent, "recent": recent}


def share_out(profile: Float[np.ndarray, "l k"], budget: int) -> Int[np.ndarray, "l k"]:
    """Whole budgets in proportion to `profile`, at least 1 each, `budget` on average.

    Layers are served in quarters of the average: layers of equal size share a compiled program,
    and a program for each layer would take minutes to compile.
    """
    layers, kv_heads = profile.shape
    quarters = _in_whole(profile.mean(1), 4 * layers)
    sizes = _in_whole(quarters, budget * profile.size, least=kv_heads)
    rows = [_in_whole(row, int(size)) for row, size in zip(profile, sizes, strict=True)]
    return np.stack(rows)


def _in_whole(
    shares: Float[np.ndarray, " n"] | Int[np.ndarray, " n"], total: int, least: int = 1
) -> Int[np.ndarray, " n"]:
    """Integers of at least `least` in proportion to `shares` that sum to `total`: rounded down,
    what is missing goes to the largest remainders.
    """
    exact = shares / shares.sum() * total
    whole = np.maximum(np.floor(exact), least).astype(int)
    missing = total - int(whole.sum())
    if missing > 0:
        order = np.argsort(-(exact - whole), kind="stable")
        for i in range(missing):
            whole[order[i % len(order)]] += 1
    for _ in range(-missing):  # `least` took too much: the largest give it back
        whole[int(np.argmax(whole))] -= 1
    return whole


def _checked(profile: Any) -> Profile:
    table = np.asarray(profile, np.float64)
    if table.ndim != 2 or not table.size or not np.all(np.isfinite(table)) or np.any(table <= 0):
        raise ValueError(
            "profile must be a table of positive numbers, one row per layer and one column per KV "
            f"head, got {profile!r}"
        )
    return tuple(tuple(map(float, row)) for row in table)


@functools.cache
def _known() -> list[dict[str, Any]]:
    file = resources.files("jaxkv.policies").joinpath("profiles.json")
    return json.loads(file.read_text(encoding="utf-8"))


def known_profile(params: Any) -> Profile | None:
    """The profile that the package has for a model of this shape; None if it has none."""
    config = params.config
    shape = {
        "architecture": params.model.__name__,
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "hidden": config.hidden_size,
        "vocabulary": config.vocab_size,
    }
    for entry in _known():
        if entry["shape"] == shape:
            return _checked(entry["profile"])
    return None
