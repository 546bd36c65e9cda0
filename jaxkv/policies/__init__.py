"""Which tokens stay: the contract in `base`, one file per family. Importing a family registers it,
and the order here is the order in which policies are listed."""

from jaxkv.policies.base import Policy, Tokens, get, protect, register, registered
from jaxkv.policies.static import Full, Random, Streaming, Window  # isort: skip
from jaxkv.policies.h2o import H2O, Heavy

__all__ = [
    "H2O",
    "Full",
    "Heavy",
    "Policy",
    "Random",
    "Streaming",
    "Tokens",
    "Window",
    "get",
    "protect",
    "register",
    "registered",
]
