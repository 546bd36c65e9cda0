"""KVzip: what a model needs to repeat a text is what any question about it needs. And KVzap, a
small model that predicts these scores, so that they cost nothing.
"""

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxkv.cache import Cache
from jaxkv.policies.base import New, Policy, Tokens, protect, register
from jaxkv.policies.wrapper import Reader
from jaxkv.statistics import ColumnMaxima, Statistic

_REPEAT = "\n\nRepeat the previous context exactly."
_CONTINUE = "\n\nRepeat the part of the previous context exactly, starting with "
#: Tokens of the earlier part that are quoted to say where to go on.
_QUOTED = 8
LEVELS = ("uniform", "heads", "all")


@register
@dataclasses.dataclass(frozen=True)
class KVzip(Policy):
    """Context reconstruction (Kim et al. 2025): once a prompt has been read, the model reads it
    again after "Repeat the previous context exactly."; what no token looked at then goes.

    Costs reading the prompt twice, with every token kept until then; the outcome does not depend
    on a question and can be used for many (see `jaxkv.Session`). Then the cache grows. Attention
    of the second reading is over all that was read (the authors leave other parts of it out of
    the softmax, which is the same for prompts that are repeated in one piece).

    Attributes:
      budget: tokens of a prompt that stay, per KV head, on average.
      level: who shares the budget: "uniform" (every head has it), "heads" (the heads of a layer
        share it), or "all" (all heads of all layers do, as the authors' program; sizes of caches
        then depend on the text, and a program is compiled for each prompt).
      chunk: tokens of the prompt that are repeated at once.
      sinks: the first tokens always stay.

    """

    level: str = "heads"
    chunk: int = 2048
    sinks: int = 4

    name: ClassVar[str] = "kvzip"
    keeps: ClassVar[str] = "what the model needs to repeat the prompt"
    frees: ClassVar[str] = "of a prompt all but the budget"
    source: ClassVar[str] = "KVzip, arXiv 2505.23416"
    drops: ClassVar[Literal["prompt"]] = "prompt"
    needs_scores: ClassVar[bool] = True
    afterwards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {self.level!r}")
        for name, least in (("chunk", 2), ("sinks", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.sinks + 1

    @property
    def pooled(self) -> bool:  # type: ignore[override]
        return self.level != "uniform"

    @property
    def statistics(self) -> tuple[()]:
        return ()

    def remember(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        return tokens.scores

    def reader(self) -> Policy:
        return Reader(self)

    def watcher(self) -> Policy:
        return _Watcher(positions=self.positions)

    def questions(self, params: Any, rows: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
        tokenizer = params.tokenizer
        first = tokenizer.encode(_REPEAT, add_special_tokens=False) if tokenizer else []
        later = tokenizer.encode(_CONTINUE, add_special_tokens=False) if tokenizer else []
        for start in range(0, max(map(len, rows)), self.chunk):
            texts = []
            for row in rows:
                part = list(row[start : start + self.chunk])
                ask = first if not start else [*later, *row[max(0, start - _QUOTED) : start]]
                texts.append([*ask, *part] if part else [])
            yield texts

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        sinks = (tokens.positions >= 0) & (tokens.positions < self.sinks)
        return protect(sinks, tokens.scores)

    def share(self, cache: Cache, budgets: Int[np.ndarray, "l b k"]) -> Int[np.ndarray, "l b k"]:
        if self.level == "uniform":
            return budgets
        layers, batch, _ = budgets.shape
        scores = np.stack([np.asarray(layer.scores) for layer in cache.layers])
        positions = np.stack([np.asarray(layer.positions) for layer in cache.layers])
        sure = (positions >= 0) & (positions < self.sinks)
        newest = positions == np.asarray(cache.length)[None, :, None, None] - 1
        scores = np.where(sure | newest, np.inf, np.where(positions < 0, -np.inf, scores))
        shared = budgets.copy()
        for row in range(batch):
            if self.level == "all":
                shared[:, row] = _best_of(scores[:, row], int(budgets[:, row].sum()))
            else:
                for layer in range(layers):
                    total = int(budgets[layer, row].sum())
                    shared[layer, row] = _best_of(scores[layer, row], total)
        return shared


def _best_of(scores: Float[np.ndarray, "... slots"], total: int) -> Int[np.ndarray, "..."]:
    """How many of the `total` best scores each row has."""
    flat = scores.reshape(-1)
    order = np.argsort(-flat, kind="stable")[:total]
    chosen = np.zeros(flat.size, bool)
    chosen[order] = np.isfinite(flat[order]) | np.isposinf(flat[order])
    counts = chosen.reshape(scores.shape).sum(-1)
    # Prompts that fit leave some over: it goes evenly to all.
    left = total - int(counts.sum())
    extra = np.full(counts.size, left // counts.size)
    extra[: left % counts.size] += 1
    return counts + extra.reshape(counts.shape)


@dataclasses.dataclass(frozen=True)
class _Watcher(Policy):
    """Notes the highest attention that anything read under it gives to what is stored."""

    budget: int | float = 1.0

    drops: ClassVar[Literal["never"]] = "never"
    needs_scores: ClassVar[bool] = True
    stores: ClassVar[bool] = False

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (ColumnMaxima(),)

    def remember(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.scores is not None
        return jnp.maximum(tokens.scores, tokens.received[0])


@dataclasses.dataclass(frozen=True, eq=False)
class Surrogate:
    """Linear models, one per layer, from a token's keys and values to the log of its KVzip scores.

    From `jaxkv.analyze.fit_surrogate`. Compared and hashed by content, so that compiled programs
    are found again.
    """

    #: Features are the keys before rotation and the values of all heads, and a constant.
    weights: Float[np.ndarray, "layers features kv_heads"]
    #: Share of the variance of the log scores that a first fit explained on texts left out of it.
    explained: float = float("nan")

    def __post_init__(self) -> None:
        content = np.ascontiguousarray(self.weights, np.float32)
        object.__setattr__(self, "weights", content)
        digest = hashlib.sha256(repr(content.shape).encode() + content.tobytes()).hexdigest()
        object.__setattr__(self, "_digest", digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Surrogate) and other._digest == self._digest  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._digest)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"Surrogate({self._digest[:12]})"  # type: ignore[attr-defined]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a `.npz` file."""
        np.savez(path, weights=self.weights, explained=self.explained)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Surrogate":
        """Reads a file written by `save`."""
        with np.load(path) as file:
            return cls(file["weights"], float(file["explained"]))


def features(
    keys: Float[Array, "batch kv_heads t dim"], values: Float[Array, "batch kv_heads dim t"]
) -> Float[Array, "batch t features"]:
    """What a `Surrogate` sees of a token in one layer."""
    rows = [jnp.moveaxis(keys, 1, 2), jnp.moveaxis(values, 3, 1)]
    flat = [x.reshape(*x.shape[:2], -1).astype(jnp.float32) for x in rows]
    return jnp.concatenate([*flat, jnp.ones_like(flat[0][..., :1])], -1)


@register
@dataclasses.dataclass(frozen=True)
class KVzap(Policy):
    """KVzip's scores, predicted when a token comes (Devoto et al. 2026): nothing is read twice, and
    tokens are dropped while decoding as well. The newest tokens stay.

    Attributes:
      budget: tokens kept; more than `recent`.
      surrogate: the predictor, from `jaxkv.analyze.fit_surrogate(params, texts)`.
      recent: how many of the newest tokens always stay.
      sinks: how many of the first tokens always stay.

    """

    surrogate: Surrogate | None = None
    recent: int = 32
    sinks: int = 4

    name: ClassVar[str] = "kvzap"
    keeps: ClassVar[str] = "what is predicted to be needed to repeat the text"
    source: ClassVar[str] = "KVzap, arXiv 2601.07891"
    needs_traits: ClassVar[bool] = True
    by_number: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.surrogate is not None and not isinstance(self.surrogate, Surrogate):
            raise ValueError(f"surrogate must be a jaxkv.Surrogate, got {self.surrogate!r}")
        for name in ("recent", "sinks"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be an int >= 0, got {value!r}")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.recent + self.sinks + 1

    def budgets(self, length: int, num_layers: int, kv_heads: int) -> Int[np.ndarray, "l k"]:
        if self.surrogate is None:
            raise ValueError(
                "kvzap needs a predictor: "
                "jaxkv.KVzap(surrogate=jaxkv.analyze.fit_surrogate(params, texts))"
            )
        layers, _, heads = self.surrogate.weights.shape
        if (layers, heads) != (num_layers, kv_heads):
            raise ValueError(
                f"the surrogate is for {layers} layers of {heads} KV heads, the model has "
                f"{num_layers} layers of {kv_heads}"
            )
        return super().budgets(length, num_layers, kv_heads)

    def trait(self, new: New) -> Float[Array, "batch kv_heads t"]:
        assert self.surrogate is not None
        weights = jnp.asarray(self.surrogate.weights)[new.layer]
        return jnp.einsum("btf,fk->bkt", features(new.keys, new.values), weights)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.traits is not None
        sure = (tokens.age < self.recent) | (tokens.positions < self.sinks)
        return protect(sure, tokens.traits)

    def split(self, budget: int) -> dict[str, int]:
        chosen = budget - self.recent - self.sinks
        return {"sinks": self.sinks, "chosen": chosen, "recent": self.recent}
