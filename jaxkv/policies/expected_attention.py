"""Expected Attention: what queries to come will look at, from the distribution of those so far."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.policies.base import Policy, Tokens, protect, register
from jaxkv.positions import Rotary


@register
@dataclasses.dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Keeps the keys that future queries are expected to attend to (Devoto et al. 2025).

    Queries of a block, before rotation, are taken as drawn from a Gaussian; rotated on average
    over the next `future` positions, they give each key an expected attention, which is weighted
    by the size of its value. The prompt is cut when it has been read, then the cache grows. Does
    not look at the question more than at the rest: the prompt may be reused for others.

    Attributes:
      budget: tokens kept of a prompt; more than `sinks`.
      future: positions to come that count.
      sinks: the first tokens always stay, and are left out of the statistics.
      use_covariance, use_value_norm: parts of the rule that can be left out.

    """

    future: int = 512
    sinks: int = 4
    use_covariance: bool = True
    use_value_norm: bool = True

    name: ClassVar[str] = "expected_attention"
    keeps: ClassVar[str] = "what queries to come are expected to look at"
    frees: ClassVar[str] = "of a prompt all but the budget"
    source: ClassVar[str] = "Expected Attention, arXiv 2510.00636"
    drops: ClassVar[Literal["prompt"]] = "prompt"

    def __post_init__(self) -> None:
        if type(self.future) is not int or self.future < 1:
            raise ValueError(f"future must be an int >= 1, got {self.future!r}")
        if type(self.sinks) is not int or self.sinks < 0:
            raise ValueError(f"sinks must be an int >= 0, got {self.sinks!r}")
        if self.positions != "original":
            raise ValueError(f"{self.name} reasons about original positions: {self!r}")
        super().__post_init__()

    @property
    def minimum(self) -> int:  # type: ignore[override]
        return self.sinks + 1

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        new, dim = tokens.new, tokens.keys.shape[-1]
        queries = new.queries.astype(jnp.float32)
        used = new.positions >= self.sinks
        # A block of sinks alone has nothing else to go by.
        used = jnp.where(jnp.any(used, 1, keepdims=True), used, new.positions >= 0)
        weights = used / jnp.maximum(jnp.sum(used, 1, keepdims=True), 1)
        mean = jnp.einsum("bkgtd,bt->bkgd", queries, weights)
        apart = (queries - mean[:, :, :, None]) * jnp.sqrt(weights)[:, None, None, :, None]
        covariance = jnp.einsum("bkgtd,bkgte->bkgde", apart, apart)
        if new.rotary is not None:
            turn = _mean_rotation(new.rotary, tokens.newest[:, 0, 0] + 1, self.future, dim)
            mean = jnp.einsum("bed,bkgd->bkge", turn, mean)
            covariance = jnp.einsum("bed,bkgdf,bhf->bkgeh", turn, covariance, turn)
        keys = tokens.turned_keys.astype(jnp.float32)
        logits = jnp.einsum("bkgd,bksd->bkgs", mean, keys) * dim**-0.5
        if self.use_covariance:
            turned = jnp.einsum("bkgde,bkse->bkgsd", covariance, keys)
            logits += jnp.einsum("bkgsd,bksd->bkgs", turned, keys) / (2 * dim)
        counted = (tokens.positions >= self.sinks)[:, :, None]
        logits = jnp.where(counted, logits, -jnp.inf)
        highest = jnp.max(logits, -1, keepdims=True)
        share = jnp.exp(logits - jnp.where(jnp.isfinite(highest), highest, 0.0))
        share /= jnp.maximum(jnp.sum(share, -1, keepdims=True), 1e-30)
        score = jnp.mean(share, 2)
        if self.use_value_norm:
            score *= jnp.linalg.norm(tokens.values.astype(jnp.float32), axis=2)
        sinks = (tokens.positions >= 0) & (tokens.positions < self.sinks)
        return protect(sinks, score)

    def split(self, budget: int) -> dict[str, int]:
        return {"sinks": self.sinks, "expected": budget - self.sinks}


def _mean_rotation(
    rotary: Rotary, start: Array, count: int, dim: int
) -> Float[Array, "batch dim dim"]:
    """The mean of the matrices that rotate to `count` positions from `start` on."""
    positions = start[:, None] + jnp.arange(count)
    identity = jnp.broadcast_to(jnp.eye(dim), (*positions.shape, dim, dim))
    # Rows of the identity, rotated, are the columns of the matrix.
    turned = rotary(identity, jnp.broadcast_to(positions[..., None], (*positions.shape, dim)))
    return jnp.swapaxes(jnp.mean(turned, 1), 1, 2)
