"""One update of training on one device and on four: run by `test_pod_training.py` in a process of
its own, which has four virtual CPU devices. Prints a line of JSON.
"""

import json
import os
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.pod.train import Recipe, placed, split, update
from jaxkv.pod.whole import Texts
from jaxkv.sharding import on_mesh_of

jax.config.update("jax_disable_most_optimizations", True)
params = jaxkv.load(Path(__file__).parent / "checkpoints" / "llama3").weights()
plan = jaxkv.PodPlan.for_config([[0, 0], [0, 1], [0, 1]], params.config)
recipe = Recipe(policy=jaxkv.PoD(plan, sinks=2, recent=6), steps=2, trains="all", distill=0.5)
tokens = np.random.default_rng(0).integers(3, 60, size=(4, 32))


def run(mesh):
    student = placed(params, mesh)
    texts = Texts.of(jnp.array(tokens, jnp.int32))
    if mesh is not None:
        spec = jax.sharding.PartitionSpec("data", "sequence")
        texts = jax.device_put(texts, jax.sharding.NamedSharding(mesh, spec))
    trained = jax.tree.map(jnp.copy, split(student, recipe))
    state = placed(recipe.optimizer().init(trained), mesh)
    with on_mesh_of(trained):
        lowered = update.lower(trained, state, student, student, texts, recipe)
        text = lowered.compile().as_text()
        trained, _, told = update(trained, state, student, student, texts, recipe)
    parts = [max(x.data.nbytes for x in leaf.addressable_shards) for leaf in trained.values()]
    return {
        "loss": float(told["loss"]),
        "norm": float(told["gradient_norm"]),
        "largest_part": max(parts),
        "all_to_all": text.count("all-to-all"),
    }


print(json.dumps([run(None), run(jaxkv.mesh(data=2, sequence=2))]))
