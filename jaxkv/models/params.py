"""`Params`: a model's weights together with what they are the weights of."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxkv import hub
from jaxkv.compilation import keep_compiled_programs
from jaxkv.errors import CheckpointError, first_line
from jaxkv.models.base import CausalLM, flatten, map_with_path, structure
from jaxkv.models.config import Config
from jaxkv.models.convert import Checkpoint, open_checkpoint
from jaxkv.models.registry import ARCHITECTURES
from jaxkv.progress import spinner
from jaxkv.sharding import format_of, spec_of
from jaxkv.tokenizer import Tokenizer

_DTYPES = ("float32", "bfloat16", "float16")
#: Tensors read at once: more would hold more of them in memory and gain nothing.
_READERS = 2
#: Tensors that old checkpoints carry and that are computed instead.
_COMPUTED = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "rope_freqs.weight")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    """Weights, and which model and tokenizer they belong to: all that `jaxkv.generate` needs.

    A pytree: its leaves are the arrays of `state`.
    """

    #: Weights in plain nested dicts, by the names of the checkpoint.
    state: Mapping[str, Any]
    model: type[CausalLM] = dataclasses.field(metadata={"static": True})
    config: Config = dataclasses.field(metadata={"static": True})
    tokenizer: Tokenizer | None = dataclasses.field(default=None, metadata={"static": True})
    name: str = dataclasses.field(default="", metadata={"static": True})

    def module(self) -> CausalLM:
        """The `flax.nnx` module with these weights, for those who work with Flax."""
        return nnx.merge(structure(self.model, self.config)[0], self.state)

    def weights(self) -> "Params":
        """The same without name and tokenizer: what compiled programs are keyed by."""
        return dataclasses.replace(self, name="", tokenizer=None)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the weights."""
        return jax.tree.leaves(self.state)[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    @property
    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """By path, the logical axis names of every weight."""
        return flatten(structure(self.model, self.config)[2])

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(self.state))
        name = self.name or self.model.__name__
        return f"Params({name}: {self.model.__name__}, {count / 1e6:.1f}M weights, {self.dtype})"


def load(
    name: str | os.PathLike[str], *, dtype: Any = None, mesh: jax.sharding.Mesh | None = None
) -> Params:
    """Loads a model.

    Args:
      name: a known name (`jaxkv models` lists them), a Hugging Face id, a folder with
        `config.json` and safetensors, or a `.gguf` file.
      dtype: of the weights and of the cache; by default float32 on CPU (where narrower types are
        slower) and bfloat16 elsewhere.
      mesh: from `jaxkv.mesh`: weights go from their files to the devices that hold a part of them,
        and what is generated with them runs on all of these.

    Raises:
      CheckpointError: there is no such model, its architecture is unknown, or its files are
        damaged, incomplete or hold a NaN.
      DownloadError: it could not be fetched.

    """
    keep_compiled_programs()
    path = hub.resolve(name)
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    if jnp.dtype(dtype) not in map(jnp.dtype, _DTYPES):
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    with spinner(f"loading {os.fspath(name)}"):
        try:
            checkpoint = open_checkpoint(path)
            model = _architecture(checkpoint)
            config = model.config_class.from_hf(checkpoint.config)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except Exception as error:  # whatever a damaged file makes its readers stumble over
            told = f"{type(error).__name__}: {first_line(error)}"
            raise CheckpointError(
                f"{path} is damaged, or a field has a wrong type: {told}"
            ) from error
        state = _read_state(checkpoint, model, config, jnp.dtype(dtype), mesh)
    return Params(state, model, config, checkpoint.tokenizer, os.fspath(name))


def random_params(
    model: type[CausalLM], config: Config, *, seed: int = 0, dtype: Any = jnp.float32
) -> Params:
    """Random weights for a config: for benchmarks and for training from nothing."""
    module = model(config, rngs=nnx.Rngs(seed))
    state = nnx.to_pure_dict(nnx.state(module))
    return Params(jax.tree.map(lambda leaf: leaf.astype(dtype), state), model, config)


def _architecture(checkpoint: Checkpoint) -> type[CausalLM]:
    names = checkpoint.config.get("architectures") or ["(none given)"]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise CheckpointError(
        f"{checkpoint.path} holds architecture {names[0]!r}; supported: {', '.join(ARCHITECTURES)}"
    )


def _read_state(
    checkpoint: Checkpoint,
    model: type[CausalLM],
    config: Config,
    dtype: np.dtype,
    mesh: jax.sharding.Mesh | None,
) -> dict[str, Any]:
    """Reads, checks and converts every tensor the model asks for, several at a time."""
    _, shapes, axes = structure(model, config)
    axes_of = flatten(axes)
    wanted = {path: _locate(checkpoint, model, path) for path in flatten(shapes)}
    tied = (
        {"lm_head.weight", "embed_out.weight", "output.weight"} if config.tie_embeddings else set()
    )
    unknown = [
        name
        for name in sorted(checkpoint.names - set(wanted.values()) - tied)
        if not name.endswith(_COMPUTED)
    ]
    if unknown:
        raise CheckpointError(
            f"{checkpoint.path} holds tensors that {model.__name__} has no place for: "
            f"{', '.join(unknown[:5])}{' ...' if len(unknown) > 5 else ''}"
        )

    def read(path: str, expected: jax.ShapeDtypeStruct) -> jax.Array:
        array = checkpoint.read(wanted[path])
        if array.shape != expected.shape:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {wanted[path]} has shape {array.shape}, "
                f"expected {expected.shape}"
            )
        # A sum is finite only if all are (and costs less than looking at each).
        with np.errstate(invalid="ignore"):
            total = np.sum(array, dtype=np.float64)
        if not np.isfinite(total):
            bad = np.argwhere(~np.isfinite(array.astype(np.float32)))[0].tolist()
            raise CheckpointError(
                f"{checkpoint.path}: tensor {wanted[path]} holds a NaN or infinity at {bad}"
            )
        return _placed(array, dtype, axes_of[path], config, mesh)

    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        futures = map_with_path(lambda path, shape: pool.submit(read, path, shape), shapes)
        try:
            return jax.tree.map(lambda future: future.result(), futures)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _placed(
    array: np.ndarray,
    dtype: np.dtype,
    axes: tuple[str | None, ...],
    config: Config,
    mesh: jax.sharding.Mesh | None,
) -> jax.Array:
    """A tensor on its devices."""
    if mesh is not None:
        spec = spec_of(axes, array.shape, mesh, config.num_kv_heads)
        place = format_of(axes, jax.sharding.NamedSharding(mesh, spec))
        return jax.device_put(array.astype(dtype, copy=False), place)
    found = jnp.asarray(array, dtype)
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = format_of(axes, alone)
    return found if place is alone else jax.device_put(found, place)


def _locate(checkpoint: Checkpoint, model: type[CausalLM], path: str) -> str:
    for prefix in dict.fromkeys((*model.prefixes, "")):
        found = checkpoint.locate(prefix + path)
        if found is not None:
            return found
    raise CheckpointError(
        f"{checkpoint.path} has no tensor {model.prefixes[0]}{path} ({len(checkpoint.names)} "
        "tensors are there)"
    )
