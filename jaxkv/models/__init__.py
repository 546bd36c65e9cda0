"""Model families as functional `flax.nnx` modules over `jaxkv.extend`, and how they are loaded."""

from jaxkv.models.base import CausalLM
from jaxkv.models.config import Config
from jaxkv.models.params import Params, load, random_params
from jaxkv.models.registry import ARCHITECTURES

__all__ = ["ARCHITECTURES", "CausalLM", "Config", "Params", "load", "random_params"]
