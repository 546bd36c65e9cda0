"""State on disk, with Orbax: arrays in a folder, and beside them a JSON file that says whose."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import Cache, LayerCache
from jaxkv.shared import Follower, Group, Merged, SharedLayer, Sharing

_ABOUT = "about.json"
_SUMS = "sha256.json"


def save(path: str | os.PathLike[str], state: Any, about: Mapping[str, Any]) -> None:
    """Writes a pytree of dataclasses, dicts and arrays, and what it is.

    Raises:
      ValueError: the folder exists.

    """
    # Half a second to import, and only those who save need it.
    import orbax.checkpoint as ocp

    folder = Path(path).absolute()
    if folder.exists():
        raise ValueError(f"{os.fspath(path)} exists already: choose another folder or remove it")
    tree = _to_dicts(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "arrays", _without_empty(tree))
    shapes = jax.tree.map(lambda x: {"shape": list(x.shape), "dtype": str(x.dtype)}, tree)
    content = {**about, "arrays": shapes}
    seal(folder / "arrays")
    # Last: a folder with this file is complete.
    (folder / _ABOUT).write_text(json.dumps(content, indent=1), encoding="utf-8")


def read_about(path: str | os.PathLike[str], kind: str, newest_format: int) -> dict[str, Any]:
    """What a folder holds.

    Raises:
      ValueError: it does not exist, is incomplete, or holds something else.

    """
    file = Path(path) / _ABOUT
    if not file.is_file():
        raise ValueError(f"{os.fspath(path)} holds no saved {kind}: there is no {file.name} in it")
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if about.get("kind") != kind:
        raise ValueError(f"{os.fspath(path)} holds a {about.get('kind')}, not a {kind}")
    if about.get("format", 0) > newest_format:
        raise ValueError(
            f"{os.fspath(path)} was written by a newer jaxkv (format {about['format']}, this one "
            f"reads up to {newest_format})"
        )
    return about


def seal(folder: Path) -> None:
    """Notes the checksums of a folder's files in it, for `check`."""
    content = json.dumps(_sums(folder), indent=1)
    part = folder / f"{_SUMS}.part"
    part.write_text(content, encoding="utf-8")
    os.replace(part, folder / _SUMS)


def seal_new(folders: Iterable[Path]) -> None:
    """Seals those that are folders and not sealed yet; on the first host."""
    if jax.process_index() == 0:
        for folder in folders:
            if folder.is_dir() and not (folder / _SUMS).exists():
                seal(folder)


def check(folder: str | os.PathLike[str]) -> None:
    """Compares a folder with what `seal` noted. To be called before Orbax reads it: what it raises
    for a damaged file is of any type, and reads it had begun are left to print tracebacks.

    Raises:
      ValueError: a file is not as it was written, or missing.

    """
    file = Path(folder) / _SUMS
    try:
        wanted = json.loads(file.read_text(encoding="utf-8"))
        found = _sums(file.parent)
    except (OSError, ValueError) as error:
        raise ValueError(f"{os.fspath(folder)} is damaged: {error}") from None
    for name in sorted(wanted):
        if found.get(name) != wanted[name]:
            how = "is not as it was written" if name in found else "is missing"
            raise ValueError(f"{os.fspath(folder)} is damaged: {name} {how}")


def _sums(folder: Path) -> dict[str, str]:
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(_SUMS):
            with path.open("rb") as file:
                sums[path.relative_to(folder).as_posix()] = hashlib.file_digest(
                    file, "sha256"
                ).hexdigest()
    return sums


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The arrays of a folder, as nested dicts.

    Raises:
      ValueError: a file is damaged or missing.

    """
    import orbax.checkpoint as ocp

    folder = Path(path).absolute()
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def abstract(tree: Any) -> Any:
        if set(tree) == {"shape", "dtype"} and isinstance(tree["shape"], list):
            return jax.ShapeDtypeStruct(tree["shape"], tree["dtype"], sharding=place)
        return {name: abstract(value) for name, value in tree.items()}

    check(folder / "arrays")
    with ocp.StandardCheckpointer() as checkpointer:
        wanted = abstract(about["arrays"])
        found = checkpointer.restore(folder / "arrays", _without_empty(wanted))
        return _with_empty(found, wanted)


def _without_empty(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Without arrays of no elements, which Orbax does not store."""
    held = {n: _without_empty(x) if isinstance(x, Mapping) else x for n, x in tree.items()}
    return {name: x for name, x in held.items() if isinstance(x, Mapping) or x.size}


def _with_empty(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What was found, and the arrays of no elements among those wanted."""

    def one(name: str, like: Any) -> Any:
        if isinstance(like, Mapping):
            return _with_empty(found[name], like)
        return found[name] if like.size else jnp.zeros(like.shape, like.dtype)

    return {name: one(name, like) for name, like in wanted.items()}


def cache_of(state: Mapping[str, Any], sharing: Sharing | None) -> Cache:
    """A cache from the nested dicts of `load`; `sharing` is the policy's."""
    layers = _in_order(state["layers"])
    if sharing is None:
        return Cache(tuple(map(_layer, layers)), state["length"])
    groups = map(sharing.groups, range(len(layers)))
    shared = map(_shared_layer, layers, groups, range(len(layers)))
    return Cache(tuple(shared), state["length"])


def _layer(layer: Mapping[str, Any]) -> LayerCache:
    return LayerCache(**{**dict.fromkeys(("scores", "ranks")), **layer})


def _shared_layer(layer: Mapping[str, Any], groups: tuple[Group, ...], index: int) -> SharedLayer:
    parts = zip(_in_order(layer["parts"]), groups, strict=True)
    made = [_layer(part) if group.root == index else _follower(part) for part, group in parts]
    return SharedLayer(tuple(made), groups)


def _follower(part: Mapping[str, Any]) -> Follower | Merged:
    if "whole" in part:
        return Merged(**{**part, "whole": _layer(part["whole"])})
    return Follower(**{"skipped": None, **part})


def _in_order(state: Mapping[str, Any]) -> list[Any]:
    """What was a tuple."""
    return [state[str(i)] for i in range(len(state))]


def _to_dicts(tree: Any) -> Any:
    """Dataclasses and tuples as dicts, without what is None, empty or static."""
    if isinstance(tree, tuple):
        return {str(i): _to_dicts(value) for i, value in enumerate(tree)}
    if dataclasses.is_dataclass(tree):
        fields = dataclasses.fields(tree)
        tree = {f.name: getattr(tree, f.name) for f in fields if not f.metadata.get("static")}
    if not isinstance(tree, Mapping):
        return tree
    return {
        name: _to_dicts(value)
        for name, value in tree.items()
        if value is not None and not (isinstance(value, tuple) and not value)
    }
