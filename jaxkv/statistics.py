"""What attention can be asked for: numbers per key, collected while queries attend.

A policy names its statistics; attention computes them beside the output. Each is plain data with
its definition as code, so that a fused kernel can recognise those it serves (`ColumnSums`) and
leave the others to this definition. A statistic of one's own is a subclass with `of`.
"""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

GROUPS = ("sum", "mean", "max")


class Rows(NamedTuple):
    """Attention of some query rows to all keys, as a statistic sees it. A probability is
    `weights * share[..., None]`.
    """

    #: Scaled; -1e30 where a query does not see a key.
    logits: Float[Array, "batch kv_heads group rows keys"]
    #: exp(logits - the row's maximum).
    weights: Float[Array, "batch kv_heads group rows keys"]
    #: One over the sum of a row's weights; 0 for rows that see nothing.
    share: Float[Array, "batch kv_heads group rows"]
    #: -1 is padding, which must give nothing.
    query_positions: Int[Array, "batch rows"]
    key_positions: Int[Array, "batch kv_heads keys"]
    layer: Int[Array, ""]
    #: Position of the newest token of the block that the rows are from.
    newest: Int[Array, " batch"]

    @property
    def real_share(self) -> Float[Array, "batch kv_heads group rows"]:
        """`share`, 0 for padding."""
        return jnp.where((self.query_positions >= 0)[:, None, None], self.share, 0.0)

    @property
    def seen(self) -> Bool[Array, "batch kv_heads group rows keys"]:
        """Which keys a row attends to."""
        return self.logits > -1e29


@dataclasses.dataclass(frozen=True)
class Statistic:
    """A number for every key, over the query rows of a block and the query heads of a KV head."""

    #: How blocks of rows, and later calls, are put together.
    reduce: ClassVar[Literal["sum", "max"]] = "sum"

    def of(self, rows: Rows) -> Float[Array, "batch kv_heads keys"]:
        """The statistic of some rows; 0 where nothing is to be added."""
        raise NotImplementedError(f"{type(self).__name__} must define of(rows)")

    def add(self, before: Array, keys: slice, rows: Rows) -> Array:
        """What was collected from other rows, and from these, which see some of the keys."""
        at = before.at[..., keys]
        return at.add(self.of(rows)) if self.reduce == "sum" else at.max(self.of(rows))


@dataclasses.dataclass(frozen=True)
class ColumnSums(Statistic):
    """Attention that each key received: the probability, to a power, summed over query rows.

    Attributes:
      group: how the query heads of a KV head are put together: "sum", "mean" or "max" (per row).
      power: exponent of the probability.
      last: of a block, only so many of the last rows count; None for all.

    """

    group: str = "sum"
    power: float = 1.0
    last: int | None = None

    def __post_init__(self) -> None:
        check_group(self.group)
        if self.last is not None and (type(self.last) is not int or self.last < 1):
            raise ValueError(f"last must be an int >= 1 or None, got {self.last!r}")

    def of(self, rows: Rows) -> Float[Array, "batch kv_heads keys"]:
        weights, share = rows.weights, rows.real_share
        if self.last is not None:
            counts = rows.query_positions > (rows.newest - self.last)[:, None]
            share = jnp.where(counts[:, None, None], share, 0.0)
        if self.power == 0.5:
            weights, share = jnp.sqrt(weights), jnp.sqrt(share)
        elif self.power != 1:
            weights, share = weights**self.power, share**self.power
        if self.group == "max":
            return jnp.sum(jnp.max(weights * share[..., None], 2), 2)
        # As a product: XLA on CPU would compute the weights anew inside a sum.
        sums = jnp.einsum("bkgr,bkgrs->bks", share, weights, precision="highest")
        return sums if self.group == "sum" else sums / weights.shape[2]


@dataclasses.dataclass(frozen=True)
class ColumnMaxima(Statistic):
    """The highest probability that any row, of any query head of the group, gave."""

    reduce: ClassVar[Literal["sum", "max"]] = "max"

    def of(self, rows: Rows) -> Float[Array, "batch kv_heads keys"]:
        return jnp.max(rows.weights * rows.real_share[..., None], (2, 3))


def check_group(group: object) -> None:
    """Raises `ValueError` unless `group` names a reduction."""
    if group not in GROUPS:
        raise ValueError(f"group must be one of {', '.join(GROUPS)}, got {group!r}")
