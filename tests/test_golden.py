"""The real model against numbers that PyTorch computed for it, with the same weights.

`golden.json` is from transformers, `story_perplexity.json` from `make_perplexities.py`.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops
from jaxkv.cache import UNBOUNDED
from jaxkv.policies import get

STORY = json.loads((Path(__file__).parent / "story_perplexity.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def all_logits(params):
    """Logits after each of some ids; one program for all lengths."""
    layers, width = params.config.num_layers, 32

    @jax.jit
    def run(params, tokens, added):
        budgets = jnp.full((layers, 1), UNBOUNDED)
        cache = loops.empty_cache(params, jaxkv.Full(), budgets, [width + 1] * layers)
        options = {"added": added, "fresh": True, "logits": "all"}
        return params.module()(tokens, cache, jaxkv.Full(), **options)[0][0]

    def logits(ids):
        tokens = jnp.array([ids + [0] * (width - len(ids))])
        return np.asarray(run(params, tokens, jnp.array([len(ids)])))[: len(ids)]

    return logits


@pytest.mark.parametrize("case", range(5))
def test_token_ids_logits_and_greedy_text(params, golden, all_logits, case):
    want = golden["cases"][case]
    assert params.tokenizer.encode(want["text"]) == want["token_ids"]
    logits = all_logits(want["token_ids"])
    assert logits.mean() == pytest.approx(want["logits_mean"], abs=1e-3)
    assert logits.std() == pytest.approx(want["logits_std"], abs=1e-3)
    for token, value in want["last_logits_top5"].items():
        assert logits[-1, int(token)] == pytest.approx(value, abs=1e-3)
    out = jaxkv.generate(params, want["text"], max_new_tokens=32, ignore_eos=True, logprobs=True)
    assert out.tokens == want["greedy_32"]
    first = logits[-1].max() - np.logaddexp.reduce(logits[-1].astype(np.float64))
    assert out.logprobs[0] == pytest.approx(first, abs=1e-3)


def test_chat(params, golden):
    want = golden["chat"]
    assert params.tokenizer.chat(want["messages"]) == want["token_ids"]
    out = jaxkv.generate(params, want["messages"], max_new_tokens=64)
    assert (out.tokens, out.text) == (want["greedy"], want["text"])


@pytest.mark.parametrize("name", STORY["perplexity"])
def test_perplexity_of_a_story(params, story, name):
    policy = get(name.removesuffix("_rolling"), STORY["budget"])
    if name == "streaming":
        policy = jaxkv.Streaming(budget=STORY["budget"], positions="original")
    assert len(story) == STORY["tokens"]
    assert jaxkv.perplexity(params, story, policy=policy) == pytest.approx(
        STORY["perplexity"][name], rel=5e-3
    )


def test_perplexity_of_wikitext(params, golden, wikitext):
    want = golden["wikitext2_first_2048"]
    assert wikitext[: len(want["first_ids"])] == want["first_ids"]
    assert jaxkv.perplexity(params, wikitext) == pytest.approx(want["perplexity_full"], abs=0.01)


@pytest.mark.parametrize("name", ["full", "window", "streaming", "h2o", "heavy"])
def test_streaming_perplexity_of_wikitext(params, golden, wikitext, name):
    want = golden["streaming_perplexity"]
    policy = get(name, want["budget"])
    if name == "streaming":
        policy = jaxkv.Streaming(budget=want["budget"], positions="original")
    found = jaxkv.perplexity(params, wikitext[:1024], policy=policy)
    assert found == pytest.approx(want["perplexity"][name], rel=5e-3)
