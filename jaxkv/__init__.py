"""Language models with a compressed key-value cache, in JAX and Flax.

params = jaxkv.load("smollm2-135m")
out = jaxkv.generate(params, text, policy="h2o", budget=0.2)
print(out.text)
print(out.report)
"""

from importlib.metadata import version

from jaxkv import analyze, pod
from jaxkv.cache import Cache, LayerCache
from jaxkv.errors import CheckpointError, DownloadError
from jaxkv.evaluate.perplexity import perplexity
from jaxkv.generate import Generation, Past, generate, stream
from jaxkv.models import Params, load
from jaxkv.pallas_kernels.dispatch import kernels, use_kernels
from jaxkv.pod import CLA, MiniCache, PoD, PodPlan
from jaxkv.policies import (
    CAKE,
    H2O,
    RKV,
    TOVA,
    AdaKV,
    Best,
    ChunkKV,
    Compose,
    CriticalKV,
    DuoAttention,
    ExpectedAttention,
    Fixed,
    Full,
    Heavy,
    KeyDiff,
    Keyformer,
    Knorm,
    KVzap,
    KVzip,
    LMInfinite,
    New,
    PlusHeavy,
    Policy,
    PyramidKV,
    Quest,
    Random,
    Scissorhands,
    SnapKV,
    Streaming,
    Strided,
    Surrogate,
    Tokens,
    TopK,
    Window,
    plus_heavy,
    protect,
    register,
)
from jaxkv.report import Report
from jaxkv.session import Session
from jaxkv.sharding import mesh
from jaxkv.statistics import ColumnMaxima, ColumnSums, Rows, Statistic

__version__ = version("jaxkv")

__all__ = [
    "CAKE",
    "CLA",
    "H2O",
    "RKV",
    "TOVA",
    "AdaKV",
    "Best",
    "Cache",
    "CheckpointError",
    "ChunkKV",
    "ColumnMaxima",
    "ColumnSums",
    "Compose",
    "CriticalKV",
    "DownloadError",
    "DuoAttention",
    "ExpectedAttention",
    "Fixed",
    "Full",
    "Generation",
    "Heavy",
    "KVzap",
    "KVzip",
    "KeyDiff",
    "Keyformer",
    "Knorm",
    "LMInfinite",
    "LayerCache",
    "MiniCache",
    "New",
    "Params",
    "Past",
    "PlusHeavy",
    "PoD",
    "PodPlan",
    "Policy",
    "PyramidKV",
    "Quest",
    "Random",
    "Report",
    "Rows",
    "Scissorhands",
    "Session",
    "SnapKV",
    "Statistic",
    "Streaming",
    "Strided",
    "Surrogate",
    "Tokens",
    "TopK",
    "Window",
    "analyze",
    "generate",
    "kernels",
    "load",
    "mesh",
    "perplexity",
    "plus_heavy",
    "pod",
    "protect",
    "register",
    "stream",
    "use_kernels",
]
