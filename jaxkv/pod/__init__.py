"""PoD: similar layers share the keys of distant tokens (arXiv 2412.02252).

plan = jaxkv.pod.explore(params, texts, target_saving=0.35)
plan = jaxkv.pod.repair(params, plan, texts)
params = jaxkv.pod.adapt(params, texts, policy=jaxkv.PoD(plan), folder="adapted")
out = jaxkv.generate(params, prompt, policy=jaxkv.PoD(plan))
"""

from jaxkv.pod.adapt import adapt, with_weights
from jaxkv.pod.cla import CLA, averaged
from jaxkv.pod.explore import explore, replan
from jaxkv.pod.minicache import MiniCache
from jaxkv.pod.pictures import draw
from jaxkv.pod.plan import PodPlan
from jaxkv.pod.policy import PoD
from jaxkv.pod.repair import repair
from jaxkv.pod.texts import pieces, returning
from jaxkv.pod.train import Recipe

__all__ = [
    "CLA",
    "MiniCache",
    "PoD",
    "PodPlan",
    "Recipe",
    "adapt",
    "averaged",
    "draw",
    "explore",
    "pieces",
    "repair",
    "replan",
    "returning",
    "with_weights",
]
