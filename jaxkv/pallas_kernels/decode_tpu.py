"""`decode` on TPU: one pass over keys and values, in Pallas (Mosaic).

The grid is (batch, KV heads, blocks of slots). Blocks of keys and values stream through VMEM; a
running maximum and sum make the output, as in FlashAttention, while the logits of all blocks stay
in a scratch row, so that at the last block every probability is known exactly and scores are
written without a second pass over the keys.

The cache is not copied: keys, values and scores come back in their own buffers, and of keys and
values only the tile around the free slot is written. Blocks still hold what that slot held before,
so the new token is put into the logits and the output by itself.

TPU stores `[slots, dim]` with slots last where dim is below 128 lanes; such keys are read as
`[dim, slots]`, for which transposing costs nothing.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from jaxkv.pallas_kernels.decode import column_sums, near_and_far
from jaxkv.pallas_kernels.decode_tpu_kernel import LANES, kernel
from jaxkv.pallas_kernels.dispatch import check_dtypes
from jaxkv.shared import Sharing
from jaxkv.statistics import ColumnSums, Statistic

#: Bytes of a block of keys or of values. There are two of each in VMEM, beside copies.
_BLOCK_BYTES = 2**20
#: Slots, and query heads of a KV head, of which logits, scores and positions fit VMEM beside the
#: blocks.
_MOST_SLOTS, _MOST_QUERIES = 2**17, 16


def check(
    queries: Array,
    key: Array,
    value: Array,
    keys: Array,
    values: Array,
    positions: Array,
    *rest: Any,
    statistics: tuple[Statistic, ...] = (),
    window: int | None = None,
    far: Sharing | None = None,
) -> None:
    """Raises `NotImplementedError` for what the kernel does not serve."""
    del rest, window, far
    column_sums(statistics)
    check_dtypes(queries=queries, key=key, value=value, keys=keys, values=values)
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"dtype must be float32 or bfloat16, got {keys.dtype.name}")
    dim, slots = keys.shape[-1], positions.shape[-1]
    if dim % 16:
        raise NotImplementedError(f"head dim must be a multiple of 16, got {dim}")
    if slots < LANES:
        raise NotImplementedError(f"fewer slots than {LANES} are not worth a kernel, got {slots}")
    kv_heads, rows = positions.shape[1], keys.shape[1]
    if rows != kv_heads:
        raise NotImplementedError(f"each KV head must have its own slots, got {rows} rows of slots")
    if queries.shape[1] // kv_heads > _MOST_QUERIES:
        raise NotImplementedError(
            f"a KV head must have at most {_MOST_QUERIES} query heads, got "
            f"{queries.shape[1] // kv_heads}"
        )
    if slots > _MOST_SLOTS:
        raise NotImplementedError(f"at most {_MOST_SLOTS} slots fit VMEM, got {slots}")


def run(
    queries: Array,
    key: Array,
    value: Array,
    keys: Array,
    values: Array,
    positions: Array,
    free: Array,
    position: Array,
    onto: Array | None,
    layer: Array,
    *,
    statistics: tuple[Statistic, ...] = (),
    window: int | None = None,
    far: Sharing | None = None,
    interpret: Any = False,
) -> tuple[Array, Array, Array, tuple[Array, ...], Array | None]:
    """See `jaxkv.pallas_kernels.decode`."""
    del layer
    sums = column_sums(statistics)
    found = attend(
        queries,
        key,
        value,
        keys,
        values,
        positions,
        free,
        position,
        onto,
        sums=sums,
        window=window,
        far=far,
        interpret=interpret,
    )
    # Where it runs on a mesh, all implementations must give the same kind of tuple.
    return tuple(found)  # type: ignore[return-value]


class Attended(NamedTuple):
    """What `attend` gives."""

    out: Array
    #: The buffers that came, with the new token; keys of another layer as they were.
    keys: Array
    values: Array
    received: tuple[Array, ...]
    #: [batch, kv_heads, group]: the log-sum-exp of distant logits; None unless asked for.
    told: Array | None


class Shared(NamedTuple):
    """What heads need beside the keys of another layer to attend with them."""

    #: What these keys are met with.
    far_queries: Array
    #: [batch, kv_heads, group, slots], float32: logits of near tokens, in their slots.
    near_logits: Array
    #: [batch, kv_heads]: whether distant tokens are left out; None for no.
    skipped: Array | None
    sharing: Sharing


def attend(
    queries: Array,
    key: Array,
    value: Array,
    keys: Array,
    values: Array,
    positions: Array,
    free: Array,
    position: Array,
    onto: Array | None = None,
    *,
    sums: ColumnSums | None = None,
    window: int | None = None,
    shared: Shared | None = None,
    far: Sharing | None = None,
    interpret: Any = False,
) -> Attended:
    """The kernel.

    Args:
      queries, key, value, keys, values, positions, free, position, onto: as for `decode`.
      sums: the statistic.
      window: tokens that a query sees at most.
      shared: the keys are those of another layer and stay as they are. Blocks of keys or of values
        of which nothing is seen are not read.
      far: what is distant, if the log-sum-exp of distant logits is wanted.
      interpret: for Pallas' interpreter.

    """
    batch, heads, dim = queries.shape
    kv_heads, slots = positions.shape[1:]
    group, size = heads // kv_heads, keys.dtype.itemsize
    slots_last = dim % LANES != 0
    block = block_of(slots, dim, size)
    blocks = pl.cdiv(slots, block)
    if sums is None:
        onto = None
    elif onto is None:
        onto = jnp.zeros(positions.shape, jnp.float32)
    prefetched = [free, position]
    if shared is not None:
        positions, reads = _needed(positions, free, position, shared, window, block)
        prefetched.append(reads)
    padding = blocks * block - slots
    inputs = [
        queries.reshape(batch, kv_heads, group, dim),
        key[:, :, None],
        value[:, :, None],
        jnp.swapaxes(keys, 2, 3) if slots_last else keys,
        values,
        jnp.pad(positions, ((0, 0), (0, 0), (0, padding)), constant_values=-1)[:, :, None],
    ]

    def part(shape: tuple[int, ...], index: Any, of: int | None = None) -> pl.BlockSpec:
        """A block of one KV head; `index` has its place, from the number of the block of slots and
        the free slot. With `of`, as that row of `_needed` says.
        """

        def place(b: Any, k: Any, j: Any, free: Any, _: Any, *reads: Any) -> Any:
            slot = free[b, k]
            if reads and of is not None:
                step = reads[0][(of * batch * kv_heads + b * kv_heads + k) * blocks + j]
                b, k, j = step // (kv_heads * blocks), step // blocks % kv_heads, step % blocks
            return b, k, *index(j, slot)

        return pl.BlockSpec((None, None, *shape), place)

    def whole(*shape: int) -> pl.BlockSpec:
        return part(shape, lambda _, __: (0, 0))

    # The tile that is written: of lanes where slots are last, of sublanes where they are rows.
    tall = 32 // size
    along = part((dim, block), lambda j, _: (0, j), 1)
    down = part((block, dim), lambda j, _: (j, 0), 0)
    of_keys = part((dim, block), lambda j, _: (0, j), 0) if slots_last else down
    tile_along = part((dim, LANES), lambda _, free: (0, free // LANES))
    tile_down = part((tall, dim), lambda _, free: (free // tall, 0))
    head, row, token = whole(group, dim), whole(1, slots), whole(1, dim)
    in_specs = [head, token, token, of_keys, along, whole(1, blocks * block)]
    out_specs = [head, tile_along if slots_last else tile_down, tile_along]
    outputs: list[Any] = [inputs[0], inputs[3], inputs[4]]
    # The cache comes back in its own buffers.
    first = len(prefetched)
    aliases = {first + 3: 1, first + 4: 2}
    if shared is not None:
        inputs += [shared.far_queries.reshape(inputs[0].shape), shared.near_logits]
        in_specs += [head, part((group, block), lambda j, _: (0, j), 1)]
        del out_specs[1], outputs[1]
        aliases = {first + 4: 1}
    cached = len(outputs)
    if onto is not None:
        inputs.append(onto[:, :, None])
        in_specs.append(row)
        outputs.append(inputs[-1])
        out_specs.append(row)
        aliases[first + len(inputs) - 1] = len(outputs) - 1
    if far is not None:
        outputs.append(jax.ShapeDtypeStruct((batch, kv_heads, group, LANES), jnp.float32))
        out_specs.append(whole(group, LANES))
    shapes: list[Any] = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    if not interpret:
        # The compiler would bring a layer that fits into VMEM as a whole, and write all of it back.
        inputs[3:5] = (pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in inputs[3:5])
        shapes[1:cached] = (pltpu.HBM(x.shape, x.dtype) for x in outputs[1:cached])
    scores_bytes = 4 if sums is None else 12
    results = pl.pallas_call(
        functools.partial(
            kernel,
            sums=sums,
            window=window,
            slots=slots,
            block=block,
            slots_last=slots_last,
            sharing=None if shared is None else shared.sharing,
            far=far,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, kv_heads, blocks),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.VMEM((1 if sums is None else blocks, group, block), jnp.float32),
                pltpu.VMEM((group, dim), jnp.float32),
                *[pltpu.VMEM((group, LANES), jnp.float32)] * (2 if far is None else 4),
            ],
        ),
        out_shape=shapes,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * slots * dim,
            bytes_accessed=batch * kv_heads * slots * (2 * dim * size + scores_bytes),
            transcendentals=2 * batch * heads * slots,
        ),
        interpret=interpret,
        name="decode",
    )(*prefetched, *inputs)
    out, *stored = results[:cached]
    if shared is None:
        keys = jnp.swapaxes(stored[0], 2, 3) if slots_last else stored[0]
    received = () if onto is None else (results[cached][:, :, 0],)
    told = None if far is None else results[-1][..., 0]
    return Attended(out.reshape(batch, heads, dim), keys, stored[-1], received, told)


def _needed(
    positions: Array, free: Array, position: Array, shared: Shared, window: int | None, block: int
) -> tuple[Array, Array]:
    """Positions, -1 where a token is skipped; and for every step of the grid the one whose block of
    keys, and whose of values, to hold `[2 * steps]`: an earlier one if it has no use for its own,
    since a block that stays the same is not read again.
    """
    near, far = near_and_far(positions, position, shared.sharing, window)
    if shared.skipped is not None:
        skipped = far & shared.skipped[..., None]
        positions, far = jnp.where(skipped, -1, positions), far & ~skipped
    slots = positions.shape[2]
    written = jnp.arange(slots) == free[..., None]
    used = jnp.stack([far, near | far | written])
    used = jnp.pad(used, ((0, 0), (0, 0), (0, 0), (0, -slots % block)))
    used = jnp.any(used.reshape(2, -1, block), -1)
    latest = lax.cummax(jnp.where(used, jnp.arange(used.shape[1]), -1), axis=1)
    reads = jnp.maximum(latest, jnp.argmax(used, 1, keepdims=True))
    return positions, reads.astype(jnp.int32).reshape(-1)


def block_of(slots: int, dim: int, size: int) -> int:
    """Slots per block: as few blocks as fit, of like sizes, in whole lanes."""
    most = max(LANES, _BLOCK_BYTES // (dim * size) // LANES * LANES)
    return -(-slots // pl.cdiv(slots, most) // LANES) * LANES
