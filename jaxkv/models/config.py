"""What a model must say about itself: the fields that the cache, the loops and the reports read.

Each family subclasses `Config` in its own file, adds the fields that only its module reads, and
implements `from_hf`, which reads a Hugging Face `config.json`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from jaxkv.positions import Rotary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model's static description: hashable, so that it can be a static argument of `jax.jit`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tie_embeddings: bool
    eos_ids: tuple[int, ...] = ()
    #: None when positions are added to the hidden state at the embedding: tokens then cannot be
    #: renumbered in the cache, so rolling positions are refused.
    rotary_embedding: Rotary | None = None
    #: Each query head has a matrix that its queries are multiplied by, before rotation, where they
    #: meet keys of another layer (see `jaxkv.pod.repair`).
    far_maps: bool = False

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a Hugging Face `config.json`; a missing field raises `ValueError` naming it."""
        raise NotImplementedError(f"{cls.__name__} does not say how to read a config.json")


def require(hf: Mapping[str, Any], key: str) -> Any:
    """The value of `key`, or a `ValueError` that says what the file has instead."""
    if hf.get(key) is None:
        there = ", ".join(sorted(name for name, value in hf.items() if value is not None))
        raise ValueError(f"the config gives no {key!r}; it gives: {there}")
    return hf[key]


def require_choice(hf: Mapping[str, Any], key: str, default: str, accepted: tuple[str, ...]) -> str:
    """The value of `key`, which must be one of `accepted` (others would be computed wrongly)."""
    value = hf.get(key) or default
    if value not in accepted:
        raise ValueError(f"the config has {key}={value!r}; supported: {', '.join(accepted)}")
    return value


def eos_ids(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-text ids; files hold one id, a list, or nothing."""
    eos = hf.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)
