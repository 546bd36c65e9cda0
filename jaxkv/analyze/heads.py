"""Which KV heads look far back, found without training: `retrieval_heads`."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv.models.params import Params
from jaxkv.policies.base import Policy
from jaxkv.prefill import read
from jaxkv.progress import spinner
from jaxkv.room import plan
from jaxkv.statistics import Rows, Statistic


def retrieval_heads(
    params: Params,
    *,
    share: float = 0.5,
    length: int = 256,
    repeats: int = 4,
    seed: int = 0,
) -> tuple[tuple[bool, ...], ...]:
    """The KV heads that look back most: a pattern for `jaxkv.DuoAttention(retrieval=...)`.

    Args:
      params: the model.
      share: of all KV heads of the model, how many are retrieval heads, in (0, 1].
      length, repeats, seed: as for `retrieval_scores`, by which heads are compared.

    Returns:
      For each layer, for each of its KV heads, whether it is one.

    Raises:
      ValueError: an argument is out of range, or the passage does not fit the model.

    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be a number in (0, 1], got {share!r}")
    scores = retrieval_scores(params, length=length, repeats=repeats, seed=seed)
    chosen = np.zeros(scores.size, bool)
    chosen[np.argsort(-scores, axis=None, kind="stable")[: round(share * scores.size)]] = True
    return tuple(tuple(map(bool, row)) for row in chosen.reshape(scores.shape))


def retrieval_scores(
    params: Params, *, length: int = 256, repeats: int = 4, seed: int = 0
) -> Float[np.ndarray, "layers kv_heads"]:
    """How much each KV head copies (induction): the model reads a passage of random tokens twice in
    a row, and the second time a head that retrieves attends to the token's place in the first copy
    or to the token after it.

    DuoAttention (Xiao et al. 2024) finds such heads by training gates on passkeys; this takes one
    reading of `2 * length` tokens.

    Args:
      params: the model.
      length: tokens of a passage; more than any window of the heads that do not retrieve.
      repeats: how many passages are read.
      seed: of the passages.

    Returns:
      The probability that a query gives to these two tokens, that of the group's highest query
      head, mean over the second copies.

    Raises:
      ValueError: an argument is out of range, or the passage does not fit the model.

    """
    for name, value, least in (("length", length, 2), ("repeats", repeats, 1), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
    rng = np.random.default_rng(seed)
    passages = rng.integers(params.config.vocab_size, size=(repeats, length))
    rows = np.concatenate([passages, passages], 1).tolist()
    watcher = _Watcher(statistic=Copying(length))
    planned = plan(params, watcher, [2 * length] * repeats, new=2 * length, grow=0)
    with spinner("looking for retrieval heads"):
        _, cache = read(params, planned, rows)
    # The statistic is noted at the rows' own tokens, and only those of second copies have any.
    sums = [np.asarray(layer.scores).sum((0, 2)) for layer in cache.layers]
    return np.stack(sums) / (repeats * length)


@dataclasses.dataclass(frozen=True)
class Copying(Statistic):
    """How much a token attends to the one `distance` tokens ago and to the next one, in the query
    head of the group where that is highest; noted at the token itself.
    """

    distance: int

    def of(self, rows: Rows) -> Float[Array, "batch kv_heads keys"]:
        back = rows.query_positions[:, None, :, None] - rows.key_positions[:, :, None, :]
        there = (rows.key_positions >= 0)[:, :, None] & (back >= self.distance - 1)
        there &= back <= self.distance
        # First copies end before there is anything to copy.
        there &= rows.query_positions[:, None, :, None] >= self.distance
        weights = jnp.where(there[:, :, None], rows.weights, 0.0)
        given = jnp.max(jnp.sum(weights, -1) * rows.real_share, 2)
        return jnp.einsum("bkr,bkrs->bks", given, (back == 0).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class _Watcher(Policy):
    """Keeps every token and notes how much it copies."""

    budget: int | float = 1.0
    statistic: Copying = Copying(1)

    drops: ClassVar[Literal["never"]] = "never"
    needs_scores: ClassVar[bool] = True

    @property
    def statistics(self) -> tuple[Statistic, ...]:
        return (self.statistic,)
