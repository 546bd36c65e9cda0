"""A decode step of one layer: the new token goes into its slot, queries meet all slots, and what
attention each slot received is added to its score.

Plain JAX does this as one scatter and two products; a kernel does it while keys and values pass by
once. The arrays of the cache are given away, and come back with the same bytes changed in place.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention import attend_slots, visible
from jaxkv.pallas_kernels.dispatch import Operation, check_dtypes
from jaxkv.shared import Sharing
from jaxkv.statistics import ColumnSums, Statistic

_MASKED = -1e30
_WRITE: dict[str, Any] = {"mode": "promise_in_bounds", "unique_indices": True}


def put(
    keys: Float[Array, "batch rows slots dim"],
    values: Float[Array, "batch rows dim slots"],
    key: Float[Array, "batch kv_heads dim"],
    value: Float[Array, "batch kv_heads dim"],
    free: Int[Array, "batch kv_heads"],
) -> tuple[Float[Array, "batch rows slots dim"], Float[Array, "batch rows dim slots"]]:
    """Writes one new token per KV head into the slot `free` (of a pool: of its only row)."""
    batch, kv_heads = free.shape
    b = jnp.arange(batch)[:, None]
    row = jnp.arange(kv_heads)[None, :] if keys.shape[1] == kv_heads else jnp.zeros((1, 1), int)
    keys = keys.at[b, row, free].set(key, **_WRITE)
    return keys, values.at[b, row, :, free].set(value, **_WRITE)


def far_logits(
    queries: Float[Array, "group dim"], keys: Float[Array, "slots dim"]
) -> Float[Array, "group slots"]:
    """Logits of the queries of one KV head with one layer's keys; vmapped over groups of heads."""
    # The cache is the left operand: on CPU that is two to three times faster.
    logits = jnp.einsum("sd,gd->sg", keys, queries, preferred_element_type=jnp.float32)
    return logits.T * queries.shape[-1] ** -0.5


logits_by_head = jax.vmap(jax.vmap(far_logits))


def near_and_far(
    positions: Int[Array, "batch kv_heads slots"],
    position: Int[Array, " batch"],
    sharing: Sharing,
    window: int | None,
) -> tuple[Bool[Array, "batch kv_heads slots"], Bool[Array, "batch kv_heads slots"]]:
    """Which slots hold near and which distant tokens that the new one sees."""
    seen = visible(position[:, None, None], positions, window)[:, :, 0]
    near = sharing.is_near(position[:, None, None], positions)
    return seen & near, seen & ~near


def far_lse(
    queries: Float[Array, "batch heads dim"],
    keys: Float[Array, "batch kv_heads slots dim"],
    positions: Int[Array, "batch kv_heads slots"],
    position: Int[Array, " batch"],
    sharing: Sharing,
    window: int | None,
) -> Float[Array, "batch kv_heads group"]:
    """Log-sum-exp of logits with distant tokens; -1e30 if there are none."""
    batch, kv_heads = keys.shape[:2]
    grouped = queries.reshape(batch, kv_heads, -1, queries.shape[-1])
    _, distant = near_and_far(positions, position, sharing, window)
    logits = jnp.where(distant[:, :, None], logits_by_head(grouped, keys), _MASKED)
    return jax.nn.logsumexp(logits, -1)


def _plain(
    queries: Float[Array, "batch heads dim"],
    key: Float[Array, "batch kv_heads dim"],
    value: Float[Array, "batch kv_heads dim"],
    keys: Float[Array, "batch kv_heads slots dim"],
    values: Float[Array, "batch kv_heads dim slots"],
    positions: Int[Array, "batch kv_heads slots"],
    free: Int[Array, "batch kv_heads"],
    position: Int[Array, " batch"],
    onto: Float[Array, "batch kv_heads slots"] | None,
    layer: Int[Array, ""],
    *,
    statistics: tuple[Statistic, ...] = (),
    window: int | None = None,
    far: Sharing | None = None,
) -> tuple[
    Float[Array, "batch heads dim"],
    Float[Array, "batch kv_heads slots dim"],
    Float[Array, "batch kv_heads dim slots"],
    tuple[Float[Array, "batch kv_heads slots"], ...],
    Float[Array, "batch kv_heads group"] | None,
]:
    """The definition.

    Args:
      queries: of the new token, rotated.
      key, value: of the new token.
      keys, values: of all slots.
      positions: of the tokens that slots hold, -1 for empty slots; that of the new token is there.
      free: the slot that the new token goes to.
      position: of the new token; -1 for a sequence that has ended: it sees nothing and gives 0.
      onto: what the first statistic is added to; None for zeros.
      layer: number of the layer.
      statistics: of the attention to collect.
      window: tokens that a query sees at most.
      far: what is distant, if the log-sum-exp of distant logits is wanted (`far_lse`).

    Returns:
      The attention output, keys and values with the new token, the statistics in float32, and the
      log-sum-exp or None.

    """
    keys, values = put(keys, values, key, value, free)
    out, received = attend_slots(
        queries,
        keys,
        values,
        visible(position[:, None, None], positions, window),
        statistics=statistics,
        query_positions=position,
        key_positions=positions,
        layer=layer,
    )
    if onto is not None:
        received = (onto + received[0], *received[1:])
    told = None if far is None else far_lse(queries, keys, positions, position, far, window)
    return out, keys, values, received, told


def _check(queries: Array, key: Array, value: Array, keys: Array, *rest: Any, **options: Any):
    del value, rest, options
    check_dtypes(queries=queries, key=key, keys=keys)


def column_sums(statistics: tuple[Statistic, ...]) -> ColumnSums | None:
    """The one statistic that kernels collect, if it is asked for.

    Raises:
      NotImplementedError: others are.

    """
    if not statistics:
        return None
    if len(statistics) > 1 or type(statistics[0]) is not ColumnSums:
        told = ", ".join(map(repr, statistics))
        raise NotImplementedError(f"of attention, only ColumnSums is collected, not {told}")
    return statistics[0]


_HEADS = ("batch", "kv_heads")
decode = Operation(
    name="decode",
    plain=_plain,
    check=_check,
    axes=(
        ("batch", "heads", None),
        (*_HEADS, None),
        (*_HEADS, None),
        (*_HEADS, None, None),
        (*_HEADS, None, None),
        (*_HEADS, None),
        _HEADS,
        ("batch",),
        (*_HEADS, None),
        (),
    ),
    out_axes=(("batch", "heads", None), *((*_HEADS, None, None),) * 2, *((*_HEADS, None),) * 2),
    overrides={"mosaic": "decode_tpu", "triton": "decode_gpu", "native": "decode_cpu"},
)
