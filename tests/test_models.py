"""Every model family against transformers, by the tiny checkpoints of `make_checkpoints.py`."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxkv
from jaxkv import loops
from jaxkv.cache import UNBOUNDED
from jaxkv.models import random_params
from jaxkv.models.base import flatten
from jaxkv.models.gpt_neox import GPTNeoXConfig
from jaxkv.models.llama import LlamaConfig
from jaxkv.positions import rotary_frequencies

FOLDERS = {path.name: path for path in sorted((Path(__file__).parent / "checkpoints").iterdir())}
FULL = jaxkv.Full()
#: Slots for the 40 tokens and a free one.
SLOTS = 41
#: Tokens of a piece; an odd number that divides nothing here.
BLOCK = 7


pytestmark = pytest.mark.usefixtures("compiled_quickly")


@functools.cache
def model_and_expected(folder):
    return jaxkv.load(folder), json.loads((folder / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture(params=FOLDERS)
def case(request):
    return model_and_expected(FOLDERS[request.param])


def empty_cache(params):
    layers = params.config.num_layers
    return loops.empty_cache(params, FULL, jnp.full((layers, 1), UNBOUNDED), (SLOTS,) * layers)


@jax.jit
def logits_at_once(params, tokens):
    model = params.module()
    return model(tokens, empty_cache(params), FULL, fresh=True, logits="all")[0][0]


def logits_in_pieces(params, tokens):
    """Logits of tokens that are fed as two blocks, and then one by one."""
    model, cache = params.module(), empty_cache(params)
    pieces = []
    for start in (0, BLOCK):
        logits, cache = model(tokens[:, start : start + BLOCK], cache, FULL, logits="all")
        pieces.append(logits[0])
    for start in range(2 * BLOCK, tokens.shape[1]):
        logits, cache = model(tokens[:, start : start + 1], cache, FULL)
        pieces.append(logits)
    return jnp.concatenate(pieces)


@pytest.mark.parametrize("compute", [logits_at_once, logits_in_pieces])
def test_logits_equal_transformers(case, compute):
    params, expected = case
    logits = compute(params, jnp.array([expected["token_ids"]]))
    np.testing.assert_allclose(logits, np.array(expected["logits"]), rtol=0, atol=1e-4)


def test_greedy_tokens_equal_transformers(case):
    params, expected = case
    out = jaxkv.generate(params, expected["token_ids"][:8], max_new_tokens=16, ignore_eos=True)
    assert out.tokens == expected["greedy_16"]
    assert out.text is None


def test_weights_name_their_axes(case):
    params, _ = case
    weights, axes = flatten(params.state), params.logical_axes
    assert weights.keys() == axes.keys()
    wrong = {path: axes[path] for path in axes if len(axes[path]) != weights[path].ndim}
    assert not wrong
    assert all(isinstance(name, str) for names in axes.values() for name in names)


def test_random_params_have_the_same_structure(case):
    params, _ = case

    make = functools.partial(random_params, params.model, params.config)
    described = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params.state
    )
    assert jax.eval_shape(make).state == described
    half = jax.eval_shape(functools.partial(make, dtype=jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("name", ["llama3", "opt"])
def test_bfloat16(name):
    folder = FOLDERS[name]
    expected = model_and_expected(folder)[1]
    params = jaxkv.load(folder, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    logits = np.asarray(logits_at_once(params, jnp.array([expected["token_ids"]])))
    assert logits.dtype == np.float32
    distance = np.sqrt(np.mean((logits - np.array(expected["logits"])) ** 2))
    # Eight bits of mantissa: clearly off, clearly the same model (logits have a spread above 0.5).
    assert 1e-3 < distance < 0.1 * np.std(expected["logits"])


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("opt", "model."), ("opt", "model.decoder."), ("gpt_neox", "gpt_neox."), ("llama3", "model.")],
)
def test_tensor_names_without_their_prefix(tmp_path, name, prefix):
    folder = FOLDERS[name]
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= {key.removeprefix(prefix): value for key, value in load_file(file).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    state, (original, _) = jaxkv.load(tmp_path).state, model_and_expected(folder)
    jax.tree.map(np.testing.assert_array_equal, state, original.state)


@pytest.mark.parametrize("name", ["gpt_neox", "gpt_neox_sequential"])
def test_gpt_neox_config_of_older_transformers(name):
    folder = FOLDERS[name]
    new = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    new["rope_parameters"] |= {"rope_theta": 500.0, "partial_rotary_factor": 0.5}
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    # rope_scaling is null in such files.
    old |= {"rotary_pct": 0.5, "rotary_emb_base": 500, "rope_scaling": None}
    assert GPTNeoXConfig.from_hf(old) == GPTNeoXConfig.from_hf(new)
    old["rotary_emb_base"] = 10000
    assert GPTNeoXConfig.from_hf(old) != GPTNeoXConfig.from_hf(new)


def llama3_factors(dim, theta, rope):
    """What each frequency is divided by, written from the formula published with Llama 3.1."""
    factors = []
    for i in range(dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wavelength
            smooth = (smooth - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def test_rope_factors_equal_the_llama3_formula():
    folder = FOLDERS["llama3"]
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = hf.pop("rope_parameters")
    theta, factors = rope["rope_theta"], llama3_factors(hf["head_dim"], rope["rope_theta"], rope)
    assert len(set(factors)) == 3, "kept, in between, and stretched"
    hf |= {"rope_theta": theta, "rope_scaling": {"rope_type": "factors", "factors": factors}}
    found = LlamaConfig.from_hf(hf).rotary_embedding.frequencies
    formula = LlamaConfig.from_hf(hf | {"rope_scaling": rope}).rotary_embedding.frequencies
    np.testing.assert_allclose(found, formula, rtol=1e-12)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, r"'llama3', got 'yarn'"),
        ({"type": "linear"}, r"'linear' has no 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, r"'llama3' has no 'low_freq_factor'"),
    ],
)
def test_rope_scalings_that_cannot_be_computed_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        rotary_frequencies(8, 10000.0, scaling)
