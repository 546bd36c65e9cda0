"""Logits -> the next token: greedy, or drawn after temperature, top-k, top-p, min-p and
repetition penalty.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Options that are None cost nothing; the values of the others are
    traced, so that changing them does not recompile.
    """

    #: None is greedy.
    temperature: Float[Array, ""] | None = None
    top_k: Int[Array, ""] | None = None
    top_p: Float[Array, ""] | None = None
    min_p: Float[Array, ""] | None = None
    repetition_penalty: Float[Array, ""] | None = None


def sampling(
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
) -> Sampling:
    """Checks the options and makes a `Sampling` of them.

    Args:
      temperature: 0 is greedy; the other options that draw are then not used.
      top_k: draw from the k most likely tokens.
      top_p: draw from the fewest tokens whose probabilities reach this sum.
      min_p: draw from tokens at least this likely, relative to the most likely one.
      repetition_penalty: divides the positive and multiplies the negative logits of tokens that
        occurred before (arXiv 1909.05858); 1 does nothing.

    Raises:
      ValueError: a value is out of range.

    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0 (0 is greedy), got {temperature}")
    if top_k is not None and not (isinstance(top_k, int) and 1 <= top_k < 2**31):
        raise ValueError(f"top_k must be an int >= 1 (below 2**31), got {top_k!r}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p must be in [0, 1], got {min_p}")
    if repetition_penalty is not None and not repetition_penalty > 0:
        raise ValueError(f"repetition_penalty must be > 0, got {repetition_penalty}")
    greedy = temperature == 0

    def traced(value: float | None, drawing: bool = True) -> Array | None:
        return None if value is None or (greedy and drawing) else jnp.float32(value)

    return Sampling(
        temperature=traced(float(temperature)),
        top_k=None if top_k is None or greedy else jnp.int32(top_k),
        top_p=traced(top_p),
        min_p=traced(min_p),
        repetition_penalty=traced(repetition_penalty, drawing=False),
    )


def row_keys(seed: int | Sequence[int], rows: int) -> Array:
    """One random key per row. An int seeds every row alike, so that a row's text does not depend
    on its neighbours; a list gives each row its own seed.

    Raises:
      ValueError: a list of another length.

    """
    seeds: list[Any] = list(seed) if isinstance(seed, Sequence) else [seed] * rows
    if not all(isinstance(s, int | np.integer) and -(2**63) <= s < 2**63 for s in seeds):
        raise ValueError(f"seed must be an int of 64 bits or one per prompt, got {seed!r}")
    if len(seeds) != rows:
        raise ValueError(f"seed must be an int or one int per prompt ({rows}), got {seed!r}")
    return jnp.stack([jax.random.key(s) for s in seeds])


def next_token(
    logits: Float[Array, "batch vocab"],
    options: Sampling,
    keys: Array,
    used: Bool[Array, "batch vocab"] | None,
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    """The next token of each row and its log-probability under the model (before any option).

    Args:
      logits: float32.
      options: how to draw.
      keys: one random key per row for this step.
      used: tokens that occurred before; needed for the repetition penalty only.

    """
    scores = logits
    if options.repetition_penalty is not None and used is not None:
        penalty = options.repetition_penalty
        scores = jnp.where(used, jnp.where(scores > 0, scores / penalty, scores * penalty), scores)
    if options.temperature is None:
        token = jnp.argmax(scores, -1)
    else:
        scores = _filter(scores / options.temperature, options)
        token = jax.vmap(jax.random.categorical)(keys, scores)
    token = token.astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, token[:, None], -1)[:, 0]
    return token, chosen - jax.nn.logsumexp(logits, -1)


def _filter(scores: Float[Array, "batch vocab"], options: Sampling) -> Float[Array, "batch vocab"]:
    """Removes what top-k, then top-p, then min-p exclude; the most likely token always stays."""
    if options.top_k is None and options.top_p is None:
        keep = jnp.ones_like(scores, bool)
    else:
        descending = jnp.sort(scores, -1, descending=True)
        place = jnp.arange(scores.shape[-1])
        in_k = jnp.broadcast_to(
            True if options.top_k is None else place < options.top_k, scores.shape
        )
        if options.top_p is not None:
            probabilities = jax.nn.softmax(jnp.where(in_k, descending, -jnp.inf), -1)
            before = jnp.cumsum(probabilities, -1) - probabilities
            in_k = in_k & (before < options.top_p)
        last = jnp.sum(in_k, -1, keepdims=True) - 1
        keep = scores >= jnp.take_along_axis(descending, jnp.maximum(last, 0), -1)
    if options.min_p is not None:
        floor = jnp.max(scores, -1, keepdims=True) + jnp.log(options.min_p)
        keep = keep & (scores >= floor)
    return jnp.where(keep, scores, -jnp.inf)
