"""Which tokens stay: the contract in `base`, one file per family. Importing a family registers it,
and the order here is the order in which policies are listed.
"""

# isort: off
from jaxkv.policies.base import New, Policy, Tokens, get, protect, register, registered
from jaxkv.policies.static import Full, LMInfinite, Streaming, Window
from jaxkv.policies.h2o import H2O, Heavy
from jaxkv.policies.random import Random
from jaxkv.policies.sparse import Fixed, Strided, TopK
from jaxkv.policies.attention import Keyformer, Scissorhands, TOVA
from jaxkv.policies.keys import KeyDiff, Knorm
from jaxkv.policies.snapkv import CAKE, PyramidKV, SnapKV
from jaxkv.policies.expected_attention import ExpectedAttention
from jaxkv.policies.r_kv import RKV
from jaxkv.policies.heads import AdaKV, DuoAttention
from jaxkv.policies.weighted import ChunkKV, CriticalKV
from jaxkv.policies.kvzip import KVzap, KVzip, Surrogate
from jaxkv.policies.quest import Quest
from jaxkv.policies.compose import Compose, PlusHeavy, plus_heavy
from jaxkv.policies.best import Best
# isort: on

__all__ = [
    "CAKE",
    "H2O",
    "RKV",
    "TOVA",
    "AdaKV",
    "Best",
    "ChunkKV",
    "Compose",
    "CriticalKV",
    "DuoAttention",
    "ExpectedAttention",
    "Fixed",
    "Full",
    "Heavy",
    "KVzap",
    "KVzip",
    "KeyDiff",
    "Keyformer",
    "Knorm",
    "LMInfinite",
    "New",
    "PlusHeavy",
    "Policy",
    "PyramidKV",
    "Quest",
    "Random",
    "Scissorhands",
    "SnapKV",
    "Streaming",
    "Strided",
    "Surrogate",
    "Tokens",
    "TopK",
    "Window",
    "get",
    "plus_heavy",
    "protect",
    "register",
    "registered",
]
