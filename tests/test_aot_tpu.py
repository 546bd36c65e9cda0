"""Programs compiled ahead of time for TPU, by its real compiler, on a machine without one.

That they compile, that the cache is changed in place, and that nothing as large as a layer's cache
is copied; what they compute is tested in `test_kernels.py`.
"""

import dataclasses
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import ColumnSums, LayerCache, PoD, PodPlan, loops
from jaxkv.cache import LAYER_AXES
from jaxkv.models.base import structure
from jaxkv.models.llama import Llama, LlamaConfig
from jaxkv.models.params import Params
from jaxkv.pallas_kernels import decode_tpu, gather_tpu, prompt_tpu
from jaxkv.pallas_kernels.dispatch import kernels
from jaxkv.policies import get
from jaxkv.positions import rotary_frequencies
from jaxkv.room import plan
from jaxkv.sampling import row_keys, sampling
from jaxkv.sharding import format_of, spec_of
from jaxkv.shared import FOLLOWER_AXES, SharedLayer

if importlib.util.find_spec("libtpu") is None:
    pytest.skip(
        "libtpu is not installed: `pip install 'jaxkv[aot]'`, or scripts/test_aot",
        allow_module_level=True,
    )

from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Shapes stand in for arrays.
pytestmark = pytest.mark.usefixtures("annotations_unchecked")

CHIPS = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}


def llama(layers, hidden, inner, heads, kv_heads, dim, vocab, *, tied):
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_positions=131_072,
        tie_embeddings=tied,
        rotary_embedding=rotary_frequencies(dim, 500_000.0, None),
        norm_eps=1e-5,
        windows=(None,) * layers,
    )


MODELS = {
    "smollm2": (llama(30, 576, 1536, 9, 3, 64, 49_152, tied=True), 32),
    "llama_3_8b": (llama(32, 4096, 14_336, 32, 8, 128, 128_256, tied=False), 16),
}
#: Tokens kept. Caches of several gigabytes, as one would serve.
BUDGET = 4000


def mesh_of(topology, data=1, model=1):
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # whatever this libtpu says of a chip that it does not know
        pytest.skip(f"libtpu has no topology {topology}: {str(error).splitlines()[0]}")
    devices = np.array(found.devices[: data * model]).reshape(data, model)
    return Mesh(devices, ("data", "model"))


def on(mesh, tree):
    """The shapes of a pytree, as arrays on all devices of a mesh would have them."""
    place = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)


def abstract_params(mesh, config, dtype=jnp.bfloat16):
    _, shapes, axes = structure(Llama, config)

    def put(shape, names):
        spec = spec_of(names, shape.shape, mesh, config.num_kv_heads)
        place = format_of(names, NamedSharding(mesh, spec))
        return jax.ShapeDtypeStruct(shape.shape, dtype, sharding=place)

    return Params(jax.tree.map(put, shapes, axes), Llama, config)


def compiled_steps(mesh, config, policy, batch, budget):
    """The loop of decode steps, compiled; and the shapes of its cache. Prompts have twice the
    budget.
    """
    params = abstract_params(mesh, config)
    planned = plan(params, get(policy, budget), [2 * budget] * batch, new=2 * budget, grow=64)

    def start():
        cache = loops.empty_cache(params, planned.policy, jnp.array(planned.budgets), planned.slots)
        ended = jnp.zeros(batch, bool)
        return loops.Loop(cache, jnp.ones(batch, jnp.int32), ended, row_keys(0, batch), None)

    def place(layer):
        if isinstance(layer, SharedLayer):
            return dataclasses.replace(layer, parts=tuple(map(place, layer.parts)))
        places = {}
        axes_of = LAYER_AXES if isinstance(layer, LayerCache) else FOLLOWER_AXES
        for name, axes in axes_of.items():
            array = getattr(layer, name)
            if array is not None:
                spec = NamedSharding(mesh, spec_of(axes, array.shape, mesh))
                array = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=spec)
            places[name] = array
        return dataclasses.replace(layer, **places)

    state = on(mesh, jax.eval_shape(start))
    layers = tuple(map(place, state.cache.layers))
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))
    stops, steps = on(mesh, (jnp.array([-1]), jnp.int32(8)))
    with jax.set_mesh(mesh):
        lowered = loops.decode.program.lower(
            params, state, sampling(), stops, steps, planned.policy
        )
    return lowered.compile(), state.cache


def check_in_place(compiled, cache):
    """All of the cache comes back in its own buffers, and nothing like a layer of it is copied."""
    total = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(cache))
    text = compiled.as_text()
    assert compiled.memory_analysis().alias_size_in_bytes >= total
    layer = cache.layers[0]
    for array in (layer.keys, layer.values):
        for shape in (array.shape, (*array.shape[:2], *array.shape[:1:-1])):
            dims = ",".join(map(str, shape))
            # Transfers ahead of use into VMEM are `copy-start`: they are no copies.
            assert not re.search(rf"\[{dims}\]\S* copy\(", text), dims
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)
    return total


def shallow(config, layers=2):
    return dataclasses.replace(config, num_layers=layers, windows=(None,) * layers)


@pytest.mark.parametrize("policy", ["h2o", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_changes_the_cache_in_place(model, policy):
    """One kernel per layer, and nothing beside it that grows with the cache."""
    config, batch = MODELS[model]
    if policy == "full":
        config = shallow(config)
    # Of Llama-3-8B the weights alone fill a v5e.
    chip = "v5e" if model == "smollm2" else "v6e"
    compiled, cache = compiled_steps(mesh_of(CHIPS[chip]), config, policy, batch, BUDGET)
    assert kernels()["decode"]["tpu"].name == "mosaic"
    assert compiled.as_text().count("tpu_custom_call") == config.num_layers
    total = check_in_place(compiled, cache)
    depth = MODELS[model][0].num_layers / config.num_layers
    # SmolLM2's three KV heads fill three of eight rows of a tile: its positions and scores are laid
    # out in another order for the kernel.
    most = 0.05 if model == "smollm2" else 0.02
    assert compiled.memory_analysis().temp_size_in_bytes < most * total * depth


@pytest.mark.parametrize("chip", ["v4", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("model", MODELS)
def test_so_it_does_on_every_chip(model, chip):
    """Two layers. (For tpu7x the compiler copies the table of tokens, for its sparse cores.)"""
    config, batch = MODELS[model]
    compiled, cache = compiled_steps(mesh_of(CHIPS[chip]), shallow(config), "h2o", batch, BUDGET)
    assert compiled.as_text().count("tpu_custom_call") == 2
    check_in_place(compiled, cache)


@pytest.mark.parametrize(("topology", "data", "model"), [("v5e:2x2", 1, 4), ("v5e:4x4", 2, 8)])
def test_on_a_mesh_only_hidden_states_travel(topology, data, model):
    """The cache is divided, and no step of a layer gathers it."""
    mesh, config = mesh_of(topology, data, model), shallow(MODELS["llama_3_8b"][0])
    compiled, cache = compiled_steps(mesh, config, "h2o", 16, BUDGET)
    text = compiled.as_text()
    assert text.count("tpu_custom_call") == config.num_layers
    slots = cache.layers[0].slots
    for line in text.splitlines():
        found = re.search(r"= (\S+) (all-gather|all-to-all|collective-permute)", line)
        assert not found or str(slots) not in found[1], line
    # Of each layer two sums: after attention and after the MLP. One more for the embedding.
    sums = len(re.findall(r" all-reduce(?:-start)?\(", text))
    assert sums <= 2 * config.num_layers + 6, sums
    total = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(cache.layers))
    assert compiled.memory_analysis().alias_size_in_bytes < 1.1 * total / (data * model) + 1e6


def decode_shapes(batch, kv_heads, group, dim, slots, dtype):
    array, int32 = jax.ShapeDtypeStruct, jnp.int32
    rows = (batch, kv_heads)
    return (
        array((batch, kv_heads * group, dim), dtype),
        array((*rows, dim), dtype),
        array((*rows, dim), dtype),
        array((*rows, slots, dim), dtype),
        array((*rows, dim, slots), dtype),
        array((*rows, slots), int32),
        array(rows, int32),
        array((batch,), int32),
        array((*rows, slots), jnp.float32),
        array((), int32),
    )


def prompt_shapes(batch, kv_heads, group, dim, t, stored, dtype):
    array, count = jax.ShapeDtypeStruct, stored + t
    rows = (batch, kv_heads)
    return (
        array((*rows, group, t, dim), dtype),
        array((batch, t), jnp.int32),
        array((*rows, count, dim), dtype),
        array((*rows, dim, count), dtype),
        array((*rows, count), jnp.int32),
    )


def gather_shapes(batch, kv_heads, dim, count, taken, dtype):
    array, rows = jax.ShapeDtypeStruct, (batch, kv_heads)
    return (
        array((*rows, count, dim), dtype),
        array((*rows, dim, count), dtype),
        array((*rows, taken), jnp.int32),
    )


def compiled_for(mesh, function, shapes):
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*on(mesh, shapes)).compile()


@pytest.mark.parametrize(
    ("dim", "group", "dtype"),
    [
        (64, 3, jnp.float32),
        (64, 1, jnp.bfloat16),
        (80, 1, jnp.bfloat16),
        (96, 7, jnp.float32),
        (128, 16, jnp.float32),
        (128, 16, jnp.bfloat16),
        (256, 2, jnp.bfloat16),
    ],
)
def test_kernels_compile_for_every_kind_of_head(dim, group, dtype):
    """Steps over an odd number of slots and over many, a prompt behind slots, compressing."""
    mesh, last = mesh_of(CHIPS["v5e"]), ColumnSums("max", 0.5, last=32)
    step = functools.partial(decode_tpu.run, statistics=(last,), window=None)
    for slots in (900, 131_072):
        compiled_for(mesh, step, decode_shapes(2, 2, group, dim, slots, dtype))
    block = functools.partial(prompt_tpu.run, statistics=(last,), window=512, layer=jnp.int32(0))
    compiled_for(mesh, block, prompt_shapes(1, 2, group, dim, 1000, 832, dtype))
    compiled_for(mesh, gather_tpu.run, gather_shapes(1, 2, dim, 1000, 208, dtype))


@pytest.mark.parametrize("chip", CHIPS)
def test_a_prompt_needs_no_matrix_as_large_as_the_text_squared(chip):
    run = functools.partial(
        prompt_tpu.run, window=None, layer=jnp.int32(0), statistics=(ColumnSums(),)
    )
    shapes = prompt_shapes(1, 8, 4, 128, 32_768, 0, jnp.bfloat16)
    compiled = compiled_for(mesh_of(CHIPS[chip]), run, shapes)
    # The log-sum-exp of 32 heads, and small things; of one head the matrix has 4 GB.
    assert compiled.memory_analysis().temp_size_in_bytes < 16e6
    gather = gather_shapes(1, 8, 128, 32_768, 6560, jnp.bfloat16)
    compiled_for(mesh_of(CHIPS[chip]), gather_tpu.run, gather)


@pytest.mark.parametrize("chip", ["v6e", "v5p"])
def test_layers_that_share_keys_are_changed_in_place(chip):
    """No layer is stored in another order, not even while it runs."""
    whole = MODELS["llama_3_8b"][0]
    config = shallow(whole, layers=4)
    root = [[0] * 8, [0, 1] * 4, [0, 1] * 4, [3, 1] * 4]
    shared = PoD(PodPlan.for_config(root, config), sinks=16, recent=2032)
    compiled, cache = compiled_steps(mesh_of(CHIPS[chip]), config, shared, 8, BUDGET)
    total = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(cache))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= total
    largest = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < largest
