"""Which tokens stay: the contract in `base`, one file per family. Importing a family registers it,
and the order here is the order in which policies are listed.
"""

# isort: off
from jaxkv.policies.base import Policy, Tokens, get, protect, register, registered
from jaxkv.policies.static import Full, Streaming, Window
from jaxkv.policies.h2o import H2O, Heavy
from jaxkv.policies.random import Random
# isort: on

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
