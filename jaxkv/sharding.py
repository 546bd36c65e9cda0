"""Where arrays lie: on which devices of a mesh, and in which order in a device's memory.

Weights and caches name their logical axes; `RULES` maps those to the axes of a mesh. Sequences of a
batch are divided over "data", attention heads, the MLP and the vocabulary over "model" (Megatron,
arXiv 1909.08053): each device attends with its own heads to its own slots, and only sums of hidden
states travel. An axis that its mesh axis does not divide is kept whole on every device; query heads
stay with their KV head.
"""

import contextlib
import dataclasses
import math
from typing import Any, TypeVar

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

#: Mesh axis of each logical axis; those that are not named are on every device as a whole.
RULES = {
    "batch": "data",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "vocab": "model",
    # Training: texts are divided by their tokens, and by heads while they attend.
    "tokens": "sequence",
    "heads_of_texts": "sequence",
}
#: Axes that are divided by whole KV heads.
_BY_HEAD = ("heads", "kv_heads")

Tree = TypeVar("Tree")


def mesh(data: int = 1, model: int = 1, sequence: int = 1) -> Mesh:
    """A mesh of `data * model` devices for `jaxkv.load(..., mesh=...)`, or of `data * sequence` for
    `jaxkv.pod.adapt(..., mesh=...)`.

    Args:
      data: how many ways the sequences of a batch are divided.
      model: how many ways heads, MLP and vocabulary are.
      sequence: how many ways the tokens of a text are, in training.

    Raises:
      ValueError: there are fewer devices, or a number is not an int >= 1.

    """
    ways = {"data": data, "model": model, "sequence": sequence}
    for name, count in ways.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} must be an int >= 1, got {count!r}")
    devices = jax.devices()
    if sequence == 1:
        del ways["sequence"]
    size = math.prod(ways.values())
    if size > len(devices):
        told = " by ".join(f"{name}={count}" for name, count in ways.items())
        raise ValueError(
            f"a mesh of {told} needs {size} devices, there are {len(devices)} "
            f"({devices[0].platform})"
        )
    return jax.make_mesh(
        tuple(ways.values()),
        tuple(ways),
        axis_types=(AxisType.Auto,) * len(ways),
        devices=devices[:size],
    )


def spec_of(
    axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Any, kv_heads: int | None = None
) -> PartitionSpec:
    """How an array with these logical axes is divided over a mesh.

    Args:
      axes: logical names, one per dimension.
      shape: of the array.
      mesh: concrete or abstract.
      kv_heads: how many the model has, where a dimension of `axes` is not heads but their
        features.

    """
    parts: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        name = RULES.get(axis or "")
        ways = dict(mesh.shape).get(name, 1) if name else 1
        count = kv_heads if axis in _BY_HEAD and kv_heads is not None else size
        parts.append(name if ways > 1 and count % ways == 0 else None)
    return PartitionSpec(*parts)


def format_of(axes: tuple[str | None, ...], sharding: Sharding) -> Format | Sharding:
    """How an array with these logical axes is laid out on its devices.

    A vocabulary is read by rows. TPU would store a table whose rows are not whole lanes by columns,
    which wastes less room, and every call of a compiled loop would make a copy of it by rows.
    """
    device: Any = next(iter(sharding.device_set))
    if device.platform == "tpu" and axes[0] == "vocab":
        return Format(Layout(tuple(range(len(axes)))), sharding)
    return sharding


def _ambient() -> Any:
    """The mesh that a program is traced for; None where it is one device."""
    found = jax.sharding.get_abstract_mesh()
    return None if found.empty or found.size == 1 else found


def constrain(array: Any, axes: tuple[str | None, ...]) -> Any:
    """Keeps an array divided as its axes say; as it is outside of a mesh. None stays None."""
    mesh = _ambient()
    if mesh is None or array is None:
        return array
    return jax.lax.with_sharding_constraint(array, spec_of(axes, array.shape, mesh))


def by_device(
    function: Any, arrays: tuple[Any, ...], axes: tuple[tuple[str | None, ...], ...], out_axes: Any
) -> Any:
    """Calls a function on every device's part of arrays: for kernels, which know of one device.

    Args:
      function: of the arrays; works on a part of a batch and of KV heads as on all of them.
      arrays: global; None stays None.
      axes: logical axes of each, "kv_heads" among them.
      out_axes: of what the function returns: a tuple of such tuples, each for an array or for all
        arrays of a tuple.

    """
    mesh = _ambient()
    if mesh is None:
        return function(*arrays)
    sizes: dict[str | None, int] = {None: 1}
    for names, array in zip(axes, arrays, strict=True):
        if array is not None:
            sizes |= dict(zip(names, array.shape, strict=True))

    def spec(names: tuple[str | None, ...]) -> PartitionSpec:
        shape = tuple(sizes[name] for name in names)
        return spec_of(names, shape, mesh, sizes["kv_heads"])

    return jax.shard_map(
        function,
        in_specs=tuple(map(spec, axes)),
        out_specs=tuple(map(spec, out_axes)),
        check_vma=False,
    )(*arrays)


def on_mesh() -> bool:
    """Whether what is being traced is divided over a mesh."""
    return _ambient() is not None


def constrain_fields(tree: Tree, axes: dict[str, tuple[str, ...]]) -> Tree:
    """`constrain` for the fields of a dataclass."""
    if _ambient() is None:
        return tree
    fields = {name: constrain(getattr(tree, name), names) for name, names in axes.items()}
    return dataclasses.replace(tree, **fields)  # type: ignore[type-var]


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh of several devices that a pytree lies on, by its first array; None without one."""
    leaf = next(iter(jax.tree.leaves(tree)), None)
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return None
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh if sharding.mesh.size > 1 else None
    return None


def on_mesh_of(tree: Any) -> Any:
    """A context in which programs are traced for the mesh of a pytree's first array."""
    mesh = mesh_of(tree)
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
