"""One real model for the whole suite, and strictness: every warning is an error, so that a donation
that fails or a dtype that is truncated is one too."""

import dataclasses
import gc
import json
import os
from pathlib import Path

import jax
import jaxtyping
import pytest

import jaxkv
from jaxkv.pallas_kernels import native

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def _programs_are_dropped():
    """Thousands of compiled programs in one process would exceed the mappings Linux allows."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def compiled_quickly():
    """For models that run for milliseconds: their compile time is all that counts."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def annotations_unchecked():
    """Users run without the checks of annotations, which would be the first to complain."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """For tests of kernels that the machine's own C++ compiler must build."""
    try:
        native.check()
    except NotImplementedError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def params() -> jaxkv.Params:
    """SmolLM2-135M, trained weights: with random ones nothing would depend on the past."""
    return jaxkv.load("smollm2-135m")


@pytest.fixture(scope="session")
def shallow(params) -> jaxkv.Params:
    """Its first two layers: trained attention, and a fifteenth of the time to compile."""
    layers = 2
    state = {**params.state, "layers": {i: params.state["layers"][i] for i in range(layers)}}
    config = dataclasses.replace(
        params.config, num_layers=layers, windows=params.config.windows[:layers]
    )
    return dataclasses.replace(params, state=state, config=config)


@pytest.fixture(scope="session")
def small() -> jaxkv.Params:
    """A random model of three layers, for what does not depend on trained weights."""
    return jaxkv.load(HERE / "checkpoints" / "llama3")


@pytest.fixture(scope="session")
def golden() -> dict:
    """What transformers computes for SmolLM2-135M."""
    return json.loads((HERE / "golden.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def story(params) -> list[int]:
    """Token ids of a short story."""
    return params.tokenizer.encode((HERE / "story.txt").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def wikitext(params) -> list[int]:
    """The first 2048 tokens of the raw WikiText-2 test split, where there is one."""
    path = Path(os.environ.get("JAXKV_TEXTS", "")) / "wikitext2_test.txt"
    if not path.is_file():
        pytest.skip("set JAXKV_TEXTS to a folder that holds wikitext2_test.txt to run this")
    return params.tokenizer.encode(path.read_text(encoding="utf-8")[:20_000])[:2048]
