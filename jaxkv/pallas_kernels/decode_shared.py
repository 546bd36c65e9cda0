"""A decode step of KV heads that read the keys of another layer for distant tokens (PoD).

The new token's key goes into the ring of near keys and its value into its slot; queries meet near
keys of their own layer and, for the other slots, those of the root; one softmax over both. It is
the published gate, `g * near + (1 - g) * far` with g = sigmoid(lse_near - lse_far), where lse is
the log-sum-exp of a part's logits: merging is exact.

The far part of a KV head may be skipped when the near part alone has nearly all of the softmax, in
every query head of the group (keys and values are read once for all of them).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.pallas_kernels.decode import logits_by_head, near_and_far
from jaxkv.pallas_kernels.dispatch import Operation, check_dtypes
from jaxkv.pallas_kernels.write import write
from jaxkv.shared import Sharing, take_heads

_MASKED = -1e30


def _plain(
    queries: Float[Array, "batch heads dim"],
    far_queries: Float[Array, "batch heads dim"],
    key: Float[Array, "batch kv_heads dim"],
    value: Float[Array, "batch kv_heads dim"],
    near_keys: Float[Array, "batch kv_heads near dim"],
    values: Float[Array, "batch kv_heads dim slots"],
    keys: Float[Array, "batch kv_heads slots dim"],
    positions: Int[Array, "batch kv_heads slots"],
    ring: Int[Array, "batch kv_heads near"],
    free: Int[Array, "batch kv_heads"],
    position: Int[Array, " batch"],
    root_far: Float[Array, "batch kv_heads group"] | None,
    *,
    sharing: Sharing,
    window: int | None = None,
) -> tuple[
    Float[Array, "batch heads dim"],
    Float[Array, "batch kv_heads near dim"],
    Float[Array, "batch kv_heads dim slots"],
    Int[Array, "batch kv_heads 2"] | None,
]:
    """The definition.

    Args:
      queries: of the new token, rotated; `far_queries` are those that distant keys are met with.
      key, value: of the new token.
      near_keys: the ring.
      values: of all slots.
      keys: of all slots in the root.
      positions: of the tokens that slots hold, that of the new token included.
      ring: the slot of each token in the ring; those of tokens that are not stored lie beyond the
        last slot.
      free: the slot of the new token.
      position: of the new token; -1 for a sequence that has ended.
      root_far: what `decode` told of the root, if that predicts what is skipped.
      sharing: what is near, and whether far parts are skipped.
      window: tokens that a query sees at most.

    Returns:
      The attention output, ring and values with the new token, and per KV head how many far parts
      were skipped (0 or 1) of how many there were.

    """
    batch, kv_heads, _, dim = near_keys.shape
    slots = values.shape[-1]
    b, k = jnp.arange(batch)[:, None], jnp.arange(kv_heads)[None]
    # A sequence that has ended writes beyond the ring: nowhere.
    seat = jnp.where(position < 0, near_keys.shape[2], sharing.seats(position))
    near_keys = near_keys.at[b, k, seat[:, None]].set(key, mode="drop", unique_indices=True)
    values = write(values, value, free)

    grouped = queries.reshape(batch, kv_heads, -1, dim)
    near_logits = logits_by_head(grouped, near_keys)
    near, distant = (x[:, :, None] for x in near_and_far(positions, position, sharing, window))
    g = jnp.arange(grouped.shape[2])[None, None, :, None]

    def whole(far: Array, near: Array) -> Array:
        """Logits by slot: near ones take the places of the root's."""
        at = (b[..., None, None], k[..., None, None], g, ring[:, :, None])
        merged = far.at[at].set(near_logits, mode="drop")
        return jnp.where(near | distant, merged, _MASKED)

    def read_far() -> Array:
        far = far_queries.reshape(grouped.shape)
        return whole(lax.optimization_barrier(logits_by_head(far, keys)), near)

    def attend(logits: Array) -> Array:
        highest = jnp.max(logits, -1)
        weights = lax.optimization_barrier(jnp.exp(logits - highest[..., None]))
        share = jnp.where(highest > _MASKED, 1 / jnp.sum(weights, -1), 0.0)
        out = jnp.einsum(
            "bkds,bkgs->bkdg",
            values,
            weights.astype(values.dtype),
            preferred_element_type=jnp.float32,
        )
        return jnp.swapaxes(out * share[:, :, None], 2, 3)

    if sharing.skip is None:
        out, counts = attend(read_far()), None
    else:
        form, tau = sharing.skip
        there = jnp.any(distant, (2, 3))
        blank = jnp.full((batch, kv_heads, grouped.shape[2], slots), _MASKED)
        only_near = jnp.where(near, whole(blank, near), _MASKED)
        logits = read_far() if form == "exact" else only_near
        if form == "exact":
            root_far = jax.nn.logsumexp(jnp.where(distant, logits, _MASKED), -1)
        assert root_far is not None
        gate = jax.nn.sigmoid(jax.nn.logsumexp(only_near, -1) - root_far)
        skip = jnp.all(gate >= tau, -1) & there
        counts = jnp.stack([skip, there], -1).astype(jnp.int32)

        def both() -> Array:
            met = logits if form == "exact" else read_far()
            return attend(jnp.where(skip[:, :, None, None], only_near, met))

        def without_far() -> Array:
            return _attend_ring(near_logits, ring, values, near)

        out = lax.cond(jnp.all(skip | ~there), without_far, both)
    return out.reshape(queries.shape).astype(queries.dtype), near_keys, values, counts


def _attend_ring(near_logits: Array, ring: Array, values: Array, near: Array) -> Array:
    """Attention to the tokens in the ring alone: other slots are not read."""
    slots = values.shape[-1]
    at = jnp.minimum(ring, slots - 1)
    seen = (ring < slots) & jnp.take_along_axis(near[:, :, 0], at, -1)
    logits = jnp.where(seen[:, :, None], near_logits, _MASKED)
    weights = jnp.exp(logits - jnp.max(logits, -1, keepdims=True))
    weights = jnp.where(seen[:, :, None], weights, 0.0)
    share = 1 / jnp.maximum(jnp.sum(weights, -1), jnp.finfo(jnp.float32).tiny)
    held = jnp.take_along_axis(values, at[:, :, None], 3)
    out = jnp.einsum(
        "bkds,bkgs->bkgd", held, weights.astype(values.dtype), preferred_element_type=jnp.float32
    )
    return out * share[..., None]


def _check(queries: Any, far_queries: Any, key: Any, value: Any, near_keys: Any, *rest: Any, **_):
    del key, value
    check_dtypes(queries=queries, far_queries=far_queries, keys=rest[1], near_keys=near_keys)


class Pieces(NamedTuple):
    """Of a group of KV heads, what `decode_shared` takes beside the new token."""

    near_keys: Float[Array, "batch kv_heads near dim"]
    values: Float[Array, "batch kv_heads dim slots"]
    keys: Float[Array, "batch kv_heads slots dim"]
    positions: Int[Array, "batch kv_heads slots"]
    ring: Int[Array, "batch kv_heads near"]
    free: Int[Array, "batch kv_heads"]
    root_far: Float[Array, "batch kv_heads group"] | None


class Changed(NamedTuple):
    """What has come of a group."""

    near_keys: Float[Array, "batch kv_heads near dim"]
    values: Float[Array, "batch kv_heads dim slots"]
    counts: Int[Array, "batch kv_heads 2"] | None


def _plain_groups(
    queries: Float[Array, "batch kv_heads group dim"],
    far_queries: Float[Array, "batch kv_heads group dim"],
    key: Float[Array, "batch kv_heads dim"],
    value: Float[Array, "batch kv_heads dim"],
    position: Int[Array, " batch"],
    groups: tuple[Pieces, ...],
    *,
    heads: tuple[tuple[int, ...], ...],
    sharing: Sharing,
    window: int | None = None,
) -> tuple[Float[Array, "batch heads group dim"], tuple[Changed, ...]]:
    """The groups of a layer that follow, one after the other.

    Args:
      queries, far_queries, key, value: of all KV heads of the layer.
      position: of the new token.
      groups: what else `decode_shared` takes.
      heads: which heads belong to which group.
      sharing, window: as there.

    Returns:
      The output of the heads of the first group, then of the second, and so on; and what has come
      of each group.

    """
    outs, changed = [], []
    for own, pieces in zip(heads, groups, strict=True):
        q, far, k, v = (take_heads(x, own, 1) for x in (queries, far_queries, key, value))
        flat = (q.shape[0], -1, q.shape[3])
        out, *rest = decode_shared(
            q.reshape(flat),
            far.reshape(flat),
            *(k, v, *pieces[:6], position, pieces.root_far),
            sharing=sharing,
            window=window,
        )
        outs.append(out.reshape(q.shape))
        changed.append(Changed(*rest))
    return (outs[0] if len(outs) == 1 else jnp.concatenate(outs, 1)), tuple(changed)


def _check_groups(*arrays: Any, **options: Any) -> None:
    """Each group is checked by itself."""
    del arrays, options


_HEADS = ("batch", "kv_heads")
decode_shared = Operation(
    name="decode_shared",
    plain=_plain,
    check=_check,
    axes=(
        ("batch", "heads", None),
        ("batch", "heads", None),
        (*_HEADS, None),
        (*_HEADS, None),
        (*_HEADS, None, None),
        (*_HEADS, None, None),
        (*_HEADS, None, None),
        (*_HEADS, None),
        (*_HEADS, None),
        _HEADS,
        ("batch",),
        (*_HEADS, None),
    ),
    out_axes=(("batch", "heads", None), *((*_HEADS, None, None),) * 2, (*_HEADS, None)),
    overrides={"mosaic": "decode_shared_tpu", "triton": "decode_shared_gpu"},
)
decode_groups = Operation(
    name="decode_groups",
    plain=_plain_groups,
    check=_check_groups,
    # Heads are named by number, so there is no part of it for each device of a mesh.
    axes=None,
    out_axes=None,
    overrides={"native": "decode_shared_cpu"},
)
