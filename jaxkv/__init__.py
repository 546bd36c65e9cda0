"""Language models with a compressed key-value cache, in JAX and Flax.

params = jaxkv.load("smollm2-135m")
out = jaxkv.generate(params, text, policy="h2o", budget=0.2)
print(out.text)
print(out.report)
"""

from importlib.metadata import version

from jaxkv.cache import Cache, LayerCache
from jaxkv.errors import CheckpointError, DownloadError
from jaxkv.evaluate.perplexity import perplexity
from jaxkv.generate import Generation, generate, stream
from jaxkv.models import Params, load
from jaxkv.policies import (
    H2O,
    Full,
    Heavy,
    Policy,
    Random,
    Streaming,
    Tokens,
    Window,
    protect,
    register,
)
from jaxkv.report import Report

__version__ = version("jaxkv")

__all__ = [
    "H2O",
    "Cache",
    "CheckpointError",
    "DownloadError",
    "Full",
    "Generation",
    "Heavy",
    "LayerCache",
    "Params",
    "Policy",
    "Random",
    "Report",
    "Streaming",
    "Tokens",
    "Window",
    "generate",
    "load",
    "perplexity",
    "protect",
    "register",
    "stream",
]
