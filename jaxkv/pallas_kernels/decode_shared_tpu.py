"""`decode_shared` on TPU: a small kernel meets the ring of near keys, and writes the new one; then
the kernel of `decode` reads the root's keys, with logits of near tokens where it has its own.

Blocks of keys without a distant token, and a far part that is skipped, are not read. Values are
read where they are: to gather those of near tokens, the compiler would first store the values of
all tokens in another order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxkv.pallas_kernels import decode_tpu
from jaxkv.pallas_kernels.decode import near_and_far
from jaxkv.pallas_kernels.decode_tpu_kernel import LANES, MASKED, column
from jaxkv.shared import Sharing


def check(
    queries: Array,
    far_queries: Array,
    key: Array,
    value: Array,
    near_keys: Array,
    values: Array,
    keys: Array,
    positions: Array,
    *rest: Any,
    sharing: Sharing,
    window: int | None = None,
) -> None:
    """Raises `NotImplementedError` for what the kernels do not serve."""
    del rest
    if sharing.skip is not None and sharing.skip[0] != "predicted":
        raise NotImplementedError(
            f"skipping must be known before a block is read: 'predicted', got {sharing.skip[0]!r}"
        )
    ring: Any = jax.ShapeDtypeStruct(near_keys.shape[:3], jnp.int32)
    decode_tpu.check(queries, key, value, near_keys, values, ring, window=window)
    decode_tpu.check(far_queries, key, value, keys, values, positions, window=window)


def run(
    queries: Array,
    far_queries: Array,
    key: Array,
    value: Array,
    near_keys: Array,
    values: Array,
    keys: Array,
    positions: Array,
    ring: Array,
    free: Array,
    position: Array,
    root_far: Array | None,
    *,
    sharing: Sharing,
    window: int | None = None,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array | None]:
    """See `jaxkv.pallas_kernels.decode_shared`."""
    seat = jnp.where(position < 0, 0, sharing.seats(position))
    seat = jnp.broadcast_to(seat[:, None], free.shape).astype(jnp.int32)
    logits, near_keys = _meet_ring(queries, key, near_keys, seat, position, interpret)
    skipped = counts = None
    if sharing.skip is not None:
        assert root_far is not None
        near, far = near_and_far(positions, position, sharing, window)
        seen = jnp.take_along_axis(near, jnp.minimum(ring, near.shape[2] - 1), 2)
        seen &= ring < near.shape[2]
        met = jnp.where(seen[:, :, None], logits, MASKED)
        there = jnp.any(far, -1)
        gate = jax.nn.sigmoid(jax.nn.logsumexp(met, -1) - root_far)
        skipped = jnp.all(gate >= sharing.skip[1], -1) & there
        counts = jnp.stack([skipped, there], -1).astype(jnp.int32)
    shared = decode_tpu.Shared(far_queries, _by_slot(logits, positions, sharing), skipped, sharing)
    found = decode_tpu.attend(
        queries,
        *(key, value, keys, values, positions, free, position),
        window=window,
        shared=shared,
        interpret=interpret,
    )
    return found.out, near_keys, found.values, counts


def _by_slot(logits: Array, positions: Array, sharing: Sharing) -> Array:
    """Logits of places in the ring in the slots of their tokens; anything in other slots."""
    slots, places = positions.shape[2], logits.shape[3]
    if sharing.evicts:
        seats = jnp.clip(sharing.seats(positions), 0, places - 1)
        return jnp.take_along_axis(logits, seats[:, :, None], 3)
    # Where slot p holds token p, the ring comes again and again.
    ring = logits[..., sharing.sinks :]
    times = -(-max(slots - places, 0) // max(ring.shape[3], 1))
    return jnp.concatenate([logits, jnp.tile(ring, (1, 1, 1, times))], 3)[..., :slots]


def _meet_ring(
    queries: Array, key: Array, near_keys: Array, seat: Array, position: Array, interpret: Any
) -> tuple[Array, Array]:
    """Logits `[batch, kv_heads, group, near]` of all places, the new token in its own, and the ring
    with its key; that of a sequence that has ended stays as it is.
    """
    batch, kv_heads, places, dim = near_keys.shape
    group, size = queries.shape[1] // kv_heads, near_keys.dtype.itemsize
    # As in `decode_tpu`: of such keys, TPU stores slots last.
    last = dim % LANES != 0
    block, tall = decode_tpu.block_of(places, dim, size), LANES if last else 32 // size
    stored = jnp.swapaxes(near_keys, 2, 3) if last else near_keys

    def spec(shape: tuple[int, int], index: Any) -> pl.BlockSpec:
        def place(b: Any, k: Any, j: Any, seat: Any, _: Any) -> Any:
            return b, k, *index(j, seat[b, k] // tall)

        return pl.BlockSpec((None, None, *shape), place)

    def along(shape: tuple[int, int], index: Any) -> pl.BlockSpec:
        """A part of the ring; `index` says which, from the block and the tile that is written."""
        if last:
            return spec(shape[::-1], lambda j, tile: (0, index(j, tile)))
        return spec(shape, lambda j, tile: (index(j, tile), 0))

    whole = spec((group, dim), lambda *_: (0, 0))
    shape: Any = jax.ShapeDtypeStruct(stored.shape, stored.dtype)
    if not interpret:
        # See `decode_tpu`.
        stored = pltpu.with_memory_space_constraint(stored, pltpu.HBM)
        shape = pltpu.HBM(stored.shape, stored.dtype)
    logits, stored = pl.pallas_call(
        functools.partial(_kernel, block=block, tall=tall, last=last),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, kv_heads, pl.cdiv(places, block)),
            in_specs=[
                whole,
                spec((1, dim), lambda *_: (0, 0)),
                along((block, dim), lambda j, _: j),
            ],
            out_specs=[
                spec((group, block), lambda j, _: (0, j)),
                along((tall, dim), lambda _, tile: tile),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, group, places), jnp.float32),
            shape,
        ],
        # Counted with the prefetched operands.
        input_output_aliases={4: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * kv_heads * group * places * dim,
            bytes_accessed=near_keys.size * size,
            transcendentals=0,
        ),
        interpret=interpret,
        name="ring",
    )(seat, position, queries.reshape(batch, kv_heads, group, dim), key[:, :, None], stored)
    return logits, jnp.swapaxes(stored, 2, 3) if last else stored


def _kernel(
    seat_ref,  # SMEM [batch, kv_heads] int32
    position_ref,  # SMEM [batch] int32
    queries_ref,  # [group, dim]
    key_ref,  # [1, dim], of the new token
    ring_ref,  # [dim, block], or [block, dim] where places are rows
    logits_ref,  # [group, block]
    tile_ref,  # [dim, 128] or [8 or 16, dim], around the place that is written
    *,
    block: int,
    tall: int,
    last: bool,
):
    b, k, j = (pl.program_id(axis) for axis in range(3))
    seat, key, queries = seat_ref[b, k], key_ref[...], queries_ref[...]
    exact = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else lax.Precision.DEFAULT
    logits = lax.dot_general(
        queries,
        ring_ref[...],
        (((1,), (0 if last else 1,)), ((), ())),
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    fresh = jnp.sum(queries.astype(jnp.float32) * key.astype(jnp.float32), 1, keepdims=True)
    place = j * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
    logits_ref[...] = jnp.where(place == seat, fresh, logits) * queries.shape[1] ** -0.5

    @pl.when(j == seat // block)
    def _write():
        first = pl.multiple_of(seat // tall * tall - j * block, tall)
        here = lax.broadcasted_iota(jnp.int32, (1, tall) if last else (tall, 1), int(last))
        here = (here == seat % tall) & (position_ref[b] >= 0)
        if last:
            tile_ref[...] = jnp.where(here, column(key), ring_ref[:, pl.ds(first, tall)])
        else:
            tile_ref[...] = jnp.where(here, key, ring_ref[pl.ds(first, tall), :])
