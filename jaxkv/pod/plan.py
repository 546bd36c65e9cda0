"""`PodPlan`: which layers of a model read whose keys, and what that saves. A JSON file on disk."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxkv.models.config import Config

_KIND, _FORMAT = "pod plan", 1
#: Of similarities, in a file.
SIMILARITY_DIGITS = 6


@dataclasses.dataclass(frozen=True, repr=False)
class PodPlan:
    """For each KV head of each layer, the layer whose keys it reads for distant tokens.

    Made by `jaxkv.pod.explore`. Frozen and hashable; what compares are the fields without a note.

    Raises:
      ValueError: a root lies above its layer, or is not a root itself, or rows differ in length,
        or maps have another shape.

    """

    #: `root[layer][kv_head]`; a head that is its own root has the number of its own layer there.
    root: tuple[tuple[int, ...], ...]
    num_heads: int
    head_dim: int
    #: The model it was made for, as it was loaded. Not compared, as all that follows.
    model: str = dataclasses.field(default="", compare=False)
    #: How the plan was made.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    #: `[layers, layers, kv_heads]`: how alike two layers attend, in [0, 1].
    similarity: Float[np.ndarray, "l l k"] | None = dataclasses.field(default=None, compare=False)
    #: `[layers, heads, dim, dim]`: what queries are multiplied by where they meet the keys of
    #: another layer, from `jaxkv.pod.repair`.
    maps: Float[np.ndarray, "l h d d"] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        root = tuple(tuple(map(int, row)) for row in self.root)
        object.__setattr__(self, "root", root)
        if not root or not root[0] or len({len(row) for row in root}) > 1:
            raise ValueError(f"root must have one row per layer, all alike long, got {self.root!r}")
        for layer, row in enumerate(root):
            for head, above in enumerate(row):
                if not 0 <= above <= layer:
                    raise ValueError(
                        f"the root of layer {layer}, head {head} is layer {above}: it must be the "
                        f"layer itself or one before it, 0 to {layer}"
                    )
                if layer > above and root[layer - 1][head] != above:
                    raise ValueError(
                        f"layer {layer}, head {head} reads the keys of layer {above}, and layer "
                        f"{layer - 1} those of layer {root[layer - 1][head]}: layers that share "
                        "must be consecutive, the root the first of them"
                    )
        shape = (len(root), self.num_heads, self.head_dim, self.head_dim)
        if self.maps is not None and self.maps.shape != shape:
            raise ValueError(
                f"maps must be [layers, heads, dim, dim], here {list(shape)}, got "
                f"{list(self.maps.shape)}"
            )

    @classmethod
    def for_config(cls, root: Sequence[Sequence[int]], config: Config, **fields: Any) -> "PodPlan":
        """A plan for a model's config."""
        rows = tuple(tuple(row) for row in root)
        plan = cls(rows, config.num_heads, config.head_dim, **fields)
        plan.check(config)
        return plan

    @classmethod
    def without_sharing(cls, config: Config) -> "PodPlan":
        """The plan under which every head is its own root."""
        rows = [[layer] * config.num_kv_heads for layer in range(config.num_layers)]
        return cls.for_config(rows, config)

    @classmethod
    def every(cls, layers: int, config: Config, *, start: int = 0) -> "PodPlan":
        """The plan under which so many consecutive layers share, from layer `start` on, in all
        heads alike.

        Raises:
          ValueError: `layers` is not an int >= 1, or `start` not a layer.

        """
        if type(layers) is not int or layers < 1:
            raise ValueError(f"layers must be an int >= 1, got {layers!r}")
        if type(start) is not int or not 0 <= start < config.num_layers:
            raise ValueError(f"start must be a layer, 0 to {config.num_layers - 1}, got {start!r}")
        rows = [
            [layer - max(layer - start, 0) % layers] * config.num_kv_heads
            for layer in range(config.num_layers)
        ]
        return cls.for_config(rows, config)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.root)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return len(self.root[0])

    @property
    def shared(self) -> int:
        """KV heads, of all layers, that read the keys of another layer."""
        return sum(root != layer for layer, row in enumerate(self.root) for root in row)

    @property
    def saving(self) -> float:
        """Share of all keys and values that is not stored, for texts without end: at most half."""
        return self.shared / (2 * self.num_layers * self.num_kv_heads)

    def saving_at(self, length: int, *, sinks: int = 16, recent: int = 4080) -> float:
        """The same for `length` tokens, of which near ones have keys of their own."""
        if length < 1:
            raise ValueError(f"length must be an int >= 1, got {length!r}")
        return self.saving * max(0, length - sinks - recent) / length

    def blocks(self, head: int) -> list[tuple[int, int]]:
        """First layer, and the one after the last, of each block of a KV head."""
        starts = [layer for layer, row in enumerate(self.root) if row[head] == layer]
        return list(zip(starts, [*starts[1:], self.num_layers], strict=True))

    def check(self, config: Config) -> None:
        """Raises `ValueError` unless the plan is for models of this config."""
        own = (self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim)
        its = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
        if own != its:
            names = "{} layers, {} heads, {} KV heads of {} dims".format
            raise ValueError(
                f"the plan is for {self.model or 'a model'} with {names(*own)}, and the model has "
                f"{names(*its)}: explore that model"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file; maps go into a `.safetensors` file beside it."""
        from safetensors.numpy import save_file

        file = Path(path)
        content: dict[str, Any] = {
            "kind": _KIND,
            "format": _FORMAT,
            "model": self.model,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "saving": round(self.saving, 4),
            "settings": dict(self.settings),
            "root": self.root,
        }
        if self.maps is not None:
            content["maps"] = file.with_suffix(".safetensors").name
            save_file({"maps": np.ascontiguousarray(self.maps)}, file.with_suffix(".safetensors"))
        if self.similarity is not None:
            content["similarity"] = np.round(self.similarity, SIMILARITY_DIGITS).tolist()
        file.write_text(_readable(content), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PodPlan":
        """Reads what `save` wrote.

        Raises:
          ValueError: there is no such file, or it is damaged, or not a plan.

        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        file = Path(path)
        if not file.is_file():
            raise ValueError(f"there is no plan {os.fspath(path)}: make one with jaxkv pod explore")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("kind") != _KIND:
                raise ValueError("it is no plan of jaxkv.pod.explore")
            if content["format"] > _FORMAT:
                raise ValueError(f"a newer jaxkv wrote it (format {content['format']})")
            similarity, maps = content.get("similarity"), content.get("maps")
            return cls(
                tuple(map(tuple, content["root"])),
                content["num_heads"],
                content["head_dim"],
                model=content["model"],
                settings=content["settings"],
                similarity=None if similarity is None else np.array(similarity, np.float64),
                maps=None if maps is None else load_file(file.with_name(maps))["maps"],
            )
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            told = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{os.fspath(path)} cannot be read as a plan: {told}") from None

    def __repr__(self) -> str:
        total = self.num_layers * self.num_kv_heads
        maps = "" if self.maps is None else ", with maps"
        return f"PodPlan({self.shared} of {total} heads follow another layer's{maps})"

    def __str__(self) -> str:
        lines = [
            f"{self.shared} of {self.num_layers * self.num_kv_heads} heads read another layer's "
            f"keys: {self.saving:.1%} of keys and values are not stored"
        ]
        for head in range(self.num_kv_heads):
            told = [f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in self.blocks(head)]
            lines.append(f"KV head {head}: layers {', '.join(told)}")
        return "\n".join(lines)


def _readable(content: Mapping[str, Any]) -> str:
    """JSON with one line per field, and per row of a table."""
    lines = []
    for name, value in content.items():
        if isinstance(value, list | tuple):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f" {json.dumps(name)}: [\n  {rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
