"""Every policy on one device and on eight: run by `test_mesh.py` in a process of its own, which
has eight virtual CPU devices. Prints one line of JSON per case.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import jaxkv
from jaxkv.policies import get, registered

HERE = Path(__file__).parent
PROMPTS = [list(range(5, 29)), list(range(40, 57)), list(range(3, 19)), list(range(43, 63))]
#: What cannot run by its name alone.
OPTIONS = {
    "quest": {"page": 4},
    "duo_attention": {"sinks": 2},
    "snapkv": {"window": 4},
    "pyramidkv": {"window": 4},
    "cake": {"window": 4},
    "r_kv": {"window": 4, "burst": 4},
    "scissorhands": {"recent": 4},
    "streaming": {"sinks": 2},
    "lm_infinite": {"globals": 2},
    "kvzip": {"sinks": 1},
    "chunkkv": {"of": jaxkv.SnapKV(window=4)},
}


def policy(name, params):
    options = dict(OPTIONS.get(name, {}))
    if name == "duo_attention":
        layers, heads = params.config.num_layers, params.config.num_kv_heads
        options["retrieval"] = tuple(tuple(j % 2 == 0 for j in range(heads)) for _ in range(layers))
    if name == "kvzap":
        config = params.config
        shape = (config.num_layers, 2 * config.num_kv_heads * config.head_dim + 1)
        weights = np.random.default_rng(0).normal(size=(*shape, config.num_kv_heads))
        options |= {"surrogate": jaxkv.Surrogate(weights), "recent": 3, "sinks": 1}
    made = registered()[name](**options)
    return dataclasses.replace(made, budget=8) if made.evicts or made.selects != "all" else made


def outcome(params, name, prompts):
    out = jaxkv.generate(params, prompts, policy=policy(name, params), max_new_tokens=5)
    kept = [
        np.sort(np.asarray(layer.by_head()), -1)[..., -24:].tolist()
        for layer in out.loop.cache.layers
    ]
    return out.tokens, kept


def two_layers(params):
    """Enough to have layers that differ, and less to compile."""
    state = {**params.state, "layers": {i: params.state["layers"][i] for i in range(2)}}
    config = dataclasses.replace(params.config, num_layers=2, windows=params.config.windows[:2])
    return dataclasses.replace(params, state=state, config=config)


def main(names):
    jax.config.update("jax_disable_most_optimizations", True)
    folder = HERE / "checkpoints" / "llama3"
    mesh = jaxkv.mesh(data=4, model=2)
    alone = two_layers(jaxkv.load(folder, dtype="float32"))
    divided = two_layers(jaxkv.load(folder, dtype="float32", mesh=mesh))
    names = names or [n for n in registered() if not get(n).simulates]
    # Products on a mesh are XLA's: with the same ones everywhere, close calls end alike.
    for name, how in [*((name, "plain") for name in names), ("h2o", "auto")]:
        with jaxkv.use_kernels(how):
            one, many = outcome(alone, name, PROMPTS), outcome(divided, name, PROMPTS)
        found = {"policy": name, "tokens": one[0] == many[0], "kept": one[1] == many[1]}
        print(json.dumps({**found, "decode": jaxkv.kernels()["decode"]["cpu"].name}))
        sys.stdout.flush()
    weight = divided.state["layers"][0]["self_attn"]["q_proj"]["weight"]
    parts = {shard.data.shape for shard in weight.addressable_shards}
    print(json.dumps({"whole": weight.shape, "parts": sorted(parts)}))


if __name__ == "__main__":
    main(sys.argv[1:])
