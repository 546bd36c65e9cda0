"""A decode step on NVIDIA GPUs, by Triton: keys and values pass by once, whatever is collected.

A few heads with many slots would leave most of a GPU idle, so the slots of a KV head are cut into
parts (split-K, as in flash decoding). Each part gives its softmax and its raw logits; a second,
small kernel puts them together, and adds what each slot received to its score.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_triton
from jax import Array

from jaxkv.pallas_kernels.decode import column_sums, far_lse
from jaxkv.pallas_kernels.dispatch import check_dtypes
from jaxkv.pallas_kernels.triton_decode import decode_join, decode_split
from jaxkv.shared import Sharing
from jaxkv.statistics import ColumnSums, Statistic

if not jax_triton.__version__.startswith("0.3."):
    # 0.4 passes arrays otherwise that are changed in place, and up to 0.4.1 fails with jax 0.12.
    raise ImportError(f"jax-triton must be of version 0.3, but {jax_triton.__version__} is here")

#: Logits in powers of two: the hardware's exponential.
LOG2_E = math.log2(math.e)
#: Query heads of a KV head, at most.
_MOST_QUERIES = 16
_LARGEST_DIM = 256
#: Bytes of keys that are on their way to one program; the same again of values.
_TILE_BYTES = 2**14
#: Programs that one processor of the GPU runs at a time, as shared memory allows.
_AT_ONCE = 2
#: What a program costs beside its blocks of slots, in blocks.
_FIXED_COST = 3
_MOST_SPLITS = 128
#: Slots for which one program of the second kernel adds up scores.
_JOINED = 512

#: By a part of the name, for programs that are compiled where there is no such GPU.
_CAPABILITIES = {
    "A100": 80,
    "A800": 80,
    "A10": 86,
    "A40": 86,
    "A6000": 86,
    "L4": 89,
    "RTX 4090": 89,
    "H100": 90,
    "H200": 90,
    "H800": 90,
    "B200": 100,
    "B300": 103,
}


class Target(NamedTuple):
    """The GPU that a program is traced for."""

    #: Compute capability: 90 is 9.0.
    capability: int
    #: Streaming multiprocessors.
    cores: int


def target() -> Target:
    """The GPU that the program being traced is for.

    jax-triton by itself asks the first GPU of the machine, which need not be there.

    Raises:
      NotImplementedError: there is none, it is of another vendor, or nothing is known about it.

    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    try:
        devices = jax.local_devices(backend="gpu")
    except RuntimeError:
        devices = []
    if described is not None:
        devices = [device for device in devices if device.device_kind == described.device_kind]
    if devices:
        capability = str(devices[0].compute_capability).replace(".", "")
        if not capability.isdigit():
            raise NotImplementedError(f"the GPU is not one of NVIDIA, it is {capability}")
        return Target(int(capability), devices[0].core_count)
    if described is None:
        raise NotImplementedError("there is no NVIDIA GPU on this machine")
    for name, found in _CAPABILITIES.items():
        if name in described.device_kind:
            return Target(found, described.num_cores)
    known = ", ".join(_CAPABILITIES)
    raise NotImplementedError(
        f"{described.device_kind!r} is not on this machine, and of others only {known} are known"
    )


def check_sizes(dtype: Any, dim: int, statistics: tuple[Statistic, ...]) -> ColumnSums | None:
    """What all kernels for GPUs ask for; gives the statistic to collect.

    Raises:
      NotImplementedError: they do not serve these.

    """
    if jnp.dtype(dtype).name not in ("float32", "bfloat16", "float16"):
        raise NotImplementedError(f"arrays must be float32, bfloat16 or float16, got {dtype}")
    if dim > _LARGEST_DIM:
        raise NotImplementedError(f"head dim must be at most {_LARGEST_DIM}, got {dim}")
    statistic = column_sums(statistics)
    if statistic is not None and statistic.power <= 0:
        raise NotImplementedError(f"power must be positive, got {statistic.power}")
    if target().capability < 80:
        raise NotImplementedError(
            f"compute capability must be 8.0 or higher, got {target().capability / 10}"
        )
    return statistic


def power_of_two(count: int, least: int = 1) -> int:
    """The first power of two from `count` up, and no less than `least`."""
    return max(least, 1 << (count - 1).bit_length())


def call(kernel: Any, *arrays: Array, **options: Any) -> Any:
    """`jax_triton.triton_call` for the GPU that is traced for."""
    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        name=kernel.__name__,
        compute_capability=target().capability,
        **options,
    )


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
    """Raises `NotImplementedError` for what `run` cannot serve."""
    del rest, window, far
    check_dtypes(queries=queries, key=key, value=value, keys=keys, values=values)
    check_sizes(keys.dtype, keys.shape[3], statistics)
    kv_heads, rows = positions.shape[1], keys.shape[1]
    if rows != kv_heads:
        raise NotImplementedError(f"each KV head must have its own slots, got {rows} rows of slots")
    group = queries.shape[1] // kv_heads
    if group > _MOST_QUERIES:
        raise NotImplementedError(
            f"a KV head must have at most {_MOST_QUERIES} query heads, got {group}"
        )


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
    interpret: bool = False,
) -> tuple[Array, Array, Array, tuple[Array, ...], Array | None]:
    """See `decode`. Keys, values and `onto` are changed in place.

    Raises:
      ValueError: `interpret` is asked for: Triton's interpreter cannot be called from JAX.

    """
    del layer
    refuse_interpreter(interpret)
    batch, kv_heads, slots, dim = keys.shape
    heads = queries.shape[1]
    group = heads // kv_heads
    statistic = column_sums(statistics)
    splits, split, block = parts_of(keys, batch * kv_heads, slots)
    sizes: dict[str, Any] = {
        "group": group,
        "padded_group": power_of_two(group),
        "dim": dim,
        "padded_dim": power_of_two(dim, 16),
        "slots": slots,
        "splits": splits,
    }

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    keys, values, partial, highest, total, logits = call(
        decode_split,
        *(queries, key, value, keys, values, positions, free, position),
        out_shape=(
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
            floats(batch, kv_heads, splits, group, dim),
            floats(batch, kv_heads, splits, group),
            floats(batch, kv_heads, splits, group),
            floats(1) if statistic is None else floats(batch, kv_heads, slots, group),
        ),
        input_output_aliases={3: 0, 4: 1},
        grid=(batch * kv_heads, splits),
        num_warps=4,
        num_stages=3,
        **sizes,
        kv_heads=kv_heads,
        split=split,
        block=block,
        scale=dim**-0.5 * LOG2_E,
        window=window or 0,
        keep_logits=statistic is not None,
    )
    base = None if statistic is None else onto
    joined = min(_JOINED, power_of_two(slots))
    out, received = call(
        decode_join,
        *(partial, highest, total, logits, total if base is None else base),
        out_shape=(
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            floats(1) if statistic is None else floats(batch, kv_heads, slots),
        ),
        input_output_aliases={} if base is None else {4: 1},
        grid=(batch * kv_heads, group + (-(-slots // joined) if statistic is not None else 0)),
        num_warps=4,
        num_stages=2,
        **sizes,
        padded_splits=power_of_two(splits),
        block=joined,
        power=1.0 if statistic is None else float(statistic.power),
        reduction="sum" if statistic is None else statistic.group,
        add=base is not None,
    )
    told = None if far is None else far_lse(queries, keys, positions, position, far, window)
    return out, keys, values, () if statistic is None else (received,), told


def parts_of(keys: Array, rows: int, slots: int) -> tuple[int, int, int]:
    """Parts that the `slots` slots of each of `rows` KV heads are cut into, slots of a part, and
    how many of them are read at once.
    """
    block = max(16, _TILE_BYTES // (power_of_two(keys.shape[3], 16) * keys.dtype.itemsize))
    block = min(block, power_of_two(slots, 16))
    return (*_split(rows, slots, block, target().cores), block)


def refuse_interpreter(interpret: bool) -> None:
    """Raises `ValueError` if `interpret` is asked for."""
    if interpret:
        raise ValueError("interpret must be False: Triton's interpreter cannot be called from JAX")


def _split(rows: int, slots: int, block: int, cores: int) -> tuple[int, int]:
    """Parts that each KV head is cut into, and slots of a part: a multiple of `block`.

    Programs run in waves, as many as fit at once; a wave lasts as long as one program. Few parts
    leave the last wave nearly empty, many cost more than they do.
    """
    blocks = -(-slots // block)

    def cost(parts: int) -> int:
        waves = -(-rows * parts // (_AT_ONCE * cores))
        return waves * (-(-blocks // parts) + _FIXED_COST)

    parts = min(range(1, min(blocks, _MOST_SPLITS) + 1), key=cost)
    each = -(-blocks // parts)
    return -(-blocks // each), each * block
