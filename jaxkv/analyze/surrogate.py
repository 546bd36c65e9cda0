"""A predictor of KVzip's scores for `jaxkv.KVzap`: `fit_surrogate`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from jaxtyping import Float

from jaxkv.models.params import Params
from jaxkv.policies.kvzip import KVzip, Surrogate, features
from jaxkv.prefill import judged_cache
from jaxkv.progress import spinner
from jaxkv.prompts import to_rows

#: Logarithms start here: attention below is as good as none.
_LEAST = 1e-8
#: Of so many texts one is left out at first, to see how well its scores are predicted.
_HELD_OUT = 5


def fit_surrogate(
    params: Params,
    texts: Sequence[Any],
    *,
    chunk: int = 2048,
    regularisation: float = 1e-2,
) -> Surrogate:
    """Fits linear models that predict the log of KVzip's scores from a token's keys and values.

    Every text is read and repeated as `jaxkv.KVzip` does it, so that the time is that of reading it
    three times; sums over tokens are all that is stored. A dozen texts of 500 to 1000 tokens, of
    the kind that will be read, are enough for a small model. The first tokens, which KVzip and
    KVzap keep anyway, are not fitted.

    Args:
      params: the model.
      texts: strings, chats or rows of token ids, each of more than 4 tokens.
      chunk: tokens of a text that are repeated at once.
      regularisation: of the ridge regression, as a share of each feature's variance.

    Returns:
      The predictor. Its `explained` is the share of the variance of log scores that a fit without
      every fifth text explains on these; NaN for fewer than five texts.

    Raises:
      ValueError: there is no text, or one is too short or does not fit the model.

    """
    if not regularisation > 0:
        raise ValueError(f"regularisation must be a number > 0, got {regularisation!r}")
    zip_policy = KVzip(
        budget=1.0,
        level="uniform",
        chunk=chunk,
        # Keys are cached before rotation then; no token moves, since none is dropped.
        positions="rolling" if params.config.rotary_embedding else "original",
    )
    rows = _rows(params, texts, zip_policy.minimum)
    room = max(map(len, rows))
    fitted = held_out = None
    with spinner("fitting the surrogate"):
        for number, row in enumerate(rows):
            sums = _sums_of(params, zip_policy, row, room)
            if number % _HELD_OUT == _HELD_OUT - 1:
                held_out = sums if held_out is None else held_out + sums
            else:
                fitted = sums if fitted is None else fitted + sums
    assert fitted is not None
    if held_out is None:
        return Surrogate(fitted.solve(regularisation))
    explained = held_out.explained(fitted.solve(regularisation))
    return Surrogate((fitted + held_out).solve(regularisation), explained)


def _rows(params: Params, texts: Sequence[Any], least: int) -> list[list[int]]:
    if isinstance(texts, str) or not len(texts):
        raise ValueError(f"texts must be a list of at least one text, got {texts!r}")
    rows, single = to_rows(params, texts)
    if single:
        raise ValueError(f"texts must be a list of texts, got one: {texts!r}")
    short = [row for row in rows if len(row) < least]
    if short:
        raise ValueError(f"each text must have at least {least} tokens, got one of {len(short[0])}")
    return rows


@dataclasses.dataclass(frozen=True)
class Sums:
    """What linear regression needs to know of features `x`, the last of which is 1, and targets
    `y`, for each layer: sums over tokens, in float64.
    """

    xx: Float[np.ndarray, "layers features features"]
    xy: Float[np.ndarray, "layers features targets"]
    yy: Float[np.ndarray, "layers targets"]

    @classmethod
    def of(
        cls,
        x: Float[np.ndarray, "layers tokens features"],
        y: Float[np.ndarray, "layers tokens targets"],
    ) -> Self:
        x, y = x.astype(np.float64), y.astype(np.float64)
        turned = np.swapaxes(x, 1, 2)
        return cls(turned @ x, turned @ y, (y**2).sum(1))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.xx + other.xx, self.xy + other.xy, self.yy + other.yy)

    def solve(self, regularisation: float) -> Float[np.ndarray, "layers features targets"]:
        """Weights by ridge regression; the constant is not held down."""
        squares = np.diagonal(self.xx, axis1=1, axis2=2)
        variance = squares - self.xx[:, -1] ** 2 / self.xx[:, -1, -1:]
        # Features that never change have weight 0.
        still = variance <= 1e-12 * squares
        penalty = np.where(still, squares + 1, regularisation * variance)
        penalty[:, -1] = 0
        held = self.xx + penalty[..., None] * np.eye(self.xx.shape[-1])
        return np.linalg.solve(held, self.xy)

    def explained(self, weights: Float[np.ndarray, "layers features targets"]) -> float:
        """Share of the targets' variance that `weights` explain, over all layers."""
        fit = np.einsum("lfk,lfk->lk", weights, 2 * self.xy - self.xx @ weights)
        mean = self.xy[:, -1] ** 2 / self.xx[:, -1, -1:]
        return float((fit - mean).sum() / (self.yy - mean).sum())


def _sums_of(params: Params, policy: KVzip, row: list[int], room: int) -> Sums:
    _, cache = judged_cache(params, policy, [row], room=room)
    parts = []
    for layer in cache.layers:
        # Nothing is dropped, so all heads hold the same tokens in the same slots.
        used = np.asarray(layer.positions)[0, 0] >= policy.sinks
        x = np.asarray(features(layer.keys, layer.values))[:, used]
        y = np.log(np.maximum(np.swapaxes(np.asarray(layer.scores), 1, 2)[:, used], _LEAST))
        parts.append(Sums.of(x, y))
    return Sums(
        np.concatenate([part.xx for part in parts]),
        np.concatenate([part.xy for part in parts]),
        np.concatenate([part.yy for part in parts]),
    )
