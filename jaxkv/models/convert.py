"""Checkpoints on disk -> config, tensors by Hugging Face name, tokenizer.

Two kinds: folders with (sharded) safetensors, and GGUF files, whose tensors are dequantised and
whose metadata is turned into the `config.json` that the same model has on the hub.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import tokenizer as tokenizers
from jaxkv.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; tensors are read one at a time."""

    path: Path
    #: The fields of a Hugging Face `config.json`.
    config: Mapping[str, Any]
    #: Names of all tensors.
    names: frozenset[str]
    #: Reads the tensor of a name.
    read: Callable[[str], np.ndarray]
    #: A parameter's Hugging Face name -> the name in this checkpoint, or None if it has none.
    locate: Callable[[str], str | None]
    tokenizer: tokenizers.Tokenizer | None


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder or a `.gguf` file.

    Raises:
      CheckpointError: files are missing or damaged.

    """
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    raise CheckpointError(f"{path} is neither a folder nor a .gguf file")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        there = ", ".join(sorted(p.name for p in path.parent.iterdir())[:8]) or "nothing"
        raise CheckpointError(f"{path.parent} has no {path.name}; it holds: {there}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got a {type(content).__name__}")
    return content


# ---- Hugging Face folders --------------------------------------------------------------------


def _open_folder(folder: Path) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    config = _read_json(folder / "config.json")
    if (folder / "generation_config.json").exists():
        # Instruction-tuned models list here all the tokens that end an answer.
        eos = _read_json(folder / "generation_config.json").get("eos_token_id")
        config |= {"eos_token_id": eos} if eos is not None else {}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        where = _read_json(index).get("weight_map")
        if not isinstance(where, dict):
            raise CheckpointError(f"{index} must hold an object 'weight_map', got {where!r}")
    else:
        files = sorted(folder.glob("model.safetensors")) or sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{folder} holds no .safetensors file: other formats of weights are not read, "
                "save the model anew with safetensors"
            )
        where = {name: file.name for file in files for name in _check_safetensors(file)}
    for name in sorted(set(where.values())):
        if not (folder / name).exists():
            raise CheckpointError(f"{folder} has no {name}, which its index names")
        if index.exists():
            _check_safetensors(folder / name)

    def read(name: str) -> np.ndarray:
        try:
            with safe_open(folder / where[name], framework="numpy") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{folder / where[name]}: tensor {name}: {error}") from None

    names = frozenset(where)
    return Checkpoint(
        path=folder,
        config=config,
        names=names,
        read=read,
        locate=lambda name: name if name in names else None,
        tokenizer=tokenizers.from_folder(folder),
    )


def _check_safetensors(file: Path) -> list[str]:
    """The names in a safetensors file, having checked that all of them lie inside it."""
    size = os.path.getsize(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(length)) if 8 + length <= size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is damaged: its header cannot be read")
    names = [name for name in header if name != "__metadata__"]
    for name in names:
        try:
            end = 8 + length + header[name]["data_offsets"][1]
        except (KeyError, IndexError, TypeError):
            raise CheckpointError(f"{file} is damaged: no place is given for {name}") from None
        if end > size:
            raise CheckpointError(
                f"{file} is cut off: tensor {name} ends at byte {end}, the file has {size}"
            )
    return names


# ---- GGUF ------------------------------------------------------------------------------------

_GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _open_gguf(path: Path) -> Checkpoint:
    import gguf

    reader = _read_gguf(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    architecture = metadata.get("general.architecture")
    if architecture not in _GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{path.name} holds architecture {architecture!r}; supported in GGUF: "
            f"{', '.join(_GGUF_ARCHITECTURES)}"
        )
    config = _gguf_config(metadata, architecture, tied="output.weight" not in tensors)
    if "rope_freqs.weight" in tensors:
        factors = tensors.pop("rope_freqs.weight").data.tolist()
        config["rope_scaling"] = {"rope_type": "factors", "factors": factors}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = name.split(".")[-2]
        # Only the llama architecture is stored with rotary pairs side by side.
        return (
            _unpermute(array, heads[part]) if architecture == "llama" and part in heads else array
        )

    name_map = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config["num_hidden_layers"],
    )

    def locate(name: str) -> str | None:
        stem, _, suffix = name.rpartition(".")
        found = name_map.get_name(stem)
        return f"{found}.{suffix}" if found and f"{found}.{suffix}" in tensors else None

    return Checkpoint(
        path=path,
        config=config,
        names=frozenset(tensors),
        read=read,
        locate=locate,
        tokenizer=tokenizers.from_gguf(metadata, path),
    )


def _read_gguf(path: Path) -> Any:
    import gguf

    class Reader(gguf.GGUFReader):
        """Names the tensor that is cut off, and reads arrays at once: a vocabulary has a hundred
        thousand entries, and each costs the base class several slices of a memory map.
        """

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list, list]:
            kinds = gguf.GGUFValueType
            start = orig_offs + 12  # after the type of the entries and their number
            header = self.data[orig_offs:start].tobytes()
            entry, count = (int.from_bytes(part, "little") for part in (header[:4], header[4:]))
            if raw_type != kinds.ARRAY or entry == kinds.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            types = [kinds.ARRAY, kinds(entry)]
            if entry != kinds.STRING:
                values = self._get(start, self.gguf_scalar_to_np[kinds(entry)], count)
                return 12 + values.nbytes, [values], [0], types
            at, view, texts = start, memoryview(self.data), []
            for _ in range(count):
                end = at + 8 + int.from_bytes(view[at : at + 8], "little")
                if end > len(view):
                    raise ValueError("a text lies beyond the end of the file")
                texts.append(view[at + 8 : end])
                at = end
            return at - orig_offs, texts, list(range(count)), types

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            whole: list[Any] = []
            for field in fields:
                try:
                    super()._build_tensors(start_offs, [field])
                except ValueError as error:
                    raise CheckpointError(
                        f"{path} is damaged or cut off: tensor {field.name}: {error}"
                    ) from None
                whole += self.tensors
            self.tensors: list[Any] = whole

    try:
        return Reader(path)
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or no GGUF file: {error}") from None


def _gguf_config(metadata: Mapping[str, Any], arch: str, *, tied: bool) -> dict[str, Any]:
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{arch}.{key}", default)

    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    heads = get("attention.head_count")
    config = {
        "architectures": [_GGUF_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": get("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ())),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "sliding_window": get("attention.sliding_window"),
        "tie_word_embeddings": tied,
        "eos_token_id": sorted({token for token in eos if token is not None}),
    }
    if get("rope.scale_linear"):  # older files
        config["rope_scaling"] = {"rope_type": "linear", "factor": get("rope.scale_linear")}
    if get("rope.scaling.type", "none") != "none":
        config["rope_scaling"] = {
            "rope_type": get("rope.scaling.type"),
            "factor": get("rope.scaling.factor"),
        }
    return config


def _unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (pair, half) order, as GGUF has them, to (half, pair)."""
    rows = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))
