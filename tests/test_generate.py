"""What a user sees: batches, budgets, turns, streams, stop strings, reports, policies of one's own.

Mostly on the first two layers of the real model: trained attention decides what is kept.
"""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops
from jaxkv.cache import UNBOUNDED
from jaxkv.compilation import CompileClock
from jaxkv.policies import base, get, registered

pytestmark = pytest.mark.usefixtures("compiled_quickly")

#: A predictor that means nothing, for two layers of three KV heads.
SURROGATE = np.random.default_rng(0).normal(size=(2, 2 * 3 * 64 + 1, 3)).astype(np.float32)
#: By name, as they are used here: the texts are short, and some need to know of the model.
POLICIES = {name: get(name) for name in registered()}
POLICIES |= {
    name: dataclasses.replace(POLICIES[name], window=4)
    for name in ("snapkv", "pyramidkv", "cake", "r_kv")
}
POLICIES["r_kv"] = dataclasses.replace(POLICIES["r_kv"], burst=5)
POLICIES["chunkkv"] = jaxkv.ChunkKV(POLICIES["snapkv"])
POLICIES["keyformer"] = jaxkv.Keyformer(steps=100)
POLICIES["duo_attention"] = jaxkv.DuoAttention(
    retrieval=[[True, False, False], [False, True, True]], sinks=2
)
POLICIES["kvzap"] = jaxkv.KVzap(surrogate=jaxkv.Surrogate(SURROGATE), recent=4)
POLICIES["best"] = jaxkv.Best(profile=[[2.0, 1.0, 0.5], [0.5, 1.0, 1.0]])
POLICIES["compose"] = jaxkv.Compose(prompt=jaxkv.AdaKV(POLICIES["snapkv"]), decode=jaxkv.H2O())
POLICIES["plus_heavy"] = jaxkv.plus_heavy(jaxkv.Strided())
POLICIES["rolling"] = jaxkv.AdaKV(jaxkv.H2O(mode="rolling"))
NAMES = list(POLICIES)
NEW = 20


def kept(out, row=0):
    """Per layer and KV head, the sorted positions of the tokens kept in one row."""
    layers = [np.asarray(layer.positions)[row] for layer in out.loop.cache.layers]
    return [[sorted(head[head >= 0].tolist()) for head in layer] for layer in layers]


DRAWING = {"temperature": 0.8, "top_p": 0.9, "seed": 3}


#: The surrogate gives equal tokens equal scores in the first layer, and which of them goes would be
#: decided by how products are rounded: no token comes twice.
DRAWN = ["h2o", "kvzap"]


@pytest.mark.parametrize(
    ("name", "drawing"),
    [(name, {}) for name in NAMES if name != "kvzap"] + [(name, DRAWING) for name in DRAWN],
    ids=str,
)
def test_a_batch_gives_what_its_rows_give_alone(shallow, story, name, drawing):
    # Lengths and budgets differ, padded sizes do not: alone, all rows run the same programs.
    prompts = [story[:90], story[200:265], story[300:396]]
    if name == "kvzap":
        prompts = [list(dict.fromkeys(prompt)) for prompt in prompts]
    options = {
        "policy": POLICIES[name].with_budget(0.25),
        "max_new_tokens": NEW,
        "logprobs": True,
        **drawing,
    }
    batch = jaxkv.generate(shallow, prompts, **options)
    for row, prompt in enumerate(prompts):
        solo = jaxkv.generate(shallow, prompt, **options)
        assert batch.tokens[row] == solo.tokens
        assert batch.text[row] == solo.text
        assert kept(batch, row) == kept(solo)
        assert batch.report.evicted[row] == solo.report.evicted[0]
        np.testing.assert_allclose(batch.logprobs[row], solo.logprobs, atol=1e-3)


def test_a_row_that_ends_leaves_the_others_alone(shallow, story):
    prompts = [story[:90], story[200:265]]
    solo = jaxkv.generate(shallow, prompts[1], policy="h2o", budget=0.25, max_new_tokens=NEW)
    ends = jaxkv.generate(shallow, prompts[0], policy="h2o", budget=0.25, max_new_tokens=NEW)
    config = dataclasses.replace(shallow.config, eos_ids=(ends.tokens[4],))
    model = dataclasses.replace(shallow, config=config)
    options = {"policy": "h2o", "budget": 0.25, "max_new_tokens": NEW}
    both = jaxkv.generate(model, prompts, **options)
    alone = jaxkv.generate(model, prompts[0], **options)
    first = ends.tokens.index(ends.tokens[4]) + 1
    assert both.tokens[0] == alone.tokens == ends.tokens[:first]
    assert kept(both, 0) == kept(alone)
    if config.eos_ids[0] not in solo.tokens:
        assert both.tokens[1] == solo.tokens
        assert kept(both, 1) == kept(solo)


@pytest.mark.parametrize(
    "name", ["h2o", "streaming", "lm_infinite", "snapkv", "adakv", "best", "kvzip", "r_kv", "topk"]
)
def test_a_budget_that_holds_everything_equals_full(shallow, story, name):
    policy = POLICIES[name].with_budget(300)
    options = {"max_new_tokens": NEW, "logprobs": True}
    full = jaxkv.generate(shallow, story[:90], **options)
    out = jaxkv.generate(shallow, story[:90], policy=policy, **options)
    assert out.tokens == full.tokens
    np.testing.assert_allclose(out.logprobs, full.logprobs, atol=1e-4)
    assert out.report.evictions == 0
    if policy.evicts:
        assert "nothing was evicted" in out.report.notes[0]


@jax.jit
def read_whole(params, tokens):
    cache = fresh_cache(params, jaxkv.Full(), UNBOUNDED, 160)
    options = {"fresh": True, "logits": "all"}
    return params.module()(tokens, cache, jaxkv.Full(), **options)[0]


def fresh_cache(params, policy, budget, slots):
    layers = params.config.num_layers
    return loops.empty_cache(params, policy, jnp.full((layers, 1), budget), [slots] * layers)


def read_in_blocks(params, policy, cache, ids, width):
    logits = jnp.zeros((1, params.config.vocab_size))
    for start in range(0, len(ids), width):
        block = jnp.array([ids[start : start + width]])
        added = jnp.array([block.shape[1]])
        logits, cache = loops.read_more(params, logits, cache, block, added, policy)
    return logits, cache


def test_chunked_equals_whole_for_full(shallow, story):
    whole = read_whole(shallow, jnp.array([story[:128]]))
    for width in (64, 1):
        ids = story[: 128 if width > 1 else 8]
        cache = fresh_cache(shallow, jaxkv.Full(), UNBOUNDED, 160)
        logits, cache = read_in_blocks(shallow, jaxkv.Full(), cache, ids, width)
        np.testing.assert_allclose(logits[0], whole[0, len(ids) - 1], atol=2e-3)


def test_chunked_keeps_what_whole_keeps_for_window(shallow, story):
    policy = jaxkv.Window(budget=40)
    caches = []
    for width in (128, 64, 1):
        cache = fresh_cache(shallow, policy, 40, 48)
        caches.append(read_in_blocks(shallow, policy, cache, story[:128], width)[1])
    for cache in caches:
        for layer in cache.layers:
            stored = np.sort(np.asarray(layer.positions), -1)[..., -40:]
            assert (stored == np.arange(88, 128)).all()
        # The first layer's keys do not depend on what was attended to: equal to the last bit or so.
        keys = by_position(cache.layers[0])
        np.testing.assert_allclose(keys, by_position(caches[0].layers[0]), atol=1e-4)


def by_position(layer):
    order = np.argsort(np.asarray(layer.positions), -1)[..., -40:]
    return np.take_along_axis(np.asarray(layer.keys), order[..., None], 2)


def test_a_second_turn_equals_never_having_stopped(shallow, story):
    first = jaxkv.generate(shallow, story[:60], max_new_tokens=8)
    second = jaxkv.generate(shallow, story[60:90], max_new_tokens=8, after=first)
    whole = story[:60] + first.tokens + story[60:90]
    assert second.tokens == jaxkv.generate(shallow, whole, max_new_tokens=8).tokens
    assert second.report.kept == [[len(whole) + 7] * 2]


@pytest.mark.parametrize("name", ["window", "streaming", "h2o"])
def test_turns_go_on_within_the_budget_and_branch(shallow, story, name):
    first = jaxkv.generate(shallow, story[:60], policy=name, budget=32, max_new_tokens=8)
    branches = [
        jaxkv.generate(shallow, story[60:90], max_new_tokens=8, after=first) for _ in range(2)
    ]
    assert branches[0].tokens == branches[1].tokens
    assert kept(branches[0]) == kept(branches[1])
    assert branches[0].report.kept == [[32] * 2]
    assert branches[0].report.evicted == [[60 + 8 + 30 + 7 - 32] * 2]
    before, after = kept(first)[0][0], kept(branches[0])[0][0]
    assert set(after) <= set(before) | set(range(67, 200)), "an evicted token came back"


def test_stream_gives_the_text_of_generate_piece_by_piece(shallow, params):
    prompt = "def fibonacci(n):"
    options = {"policy": "h2o", "budget": 16, "max_new_tokens": 40}
    pieces = jaxkv.stream(shallow, prompt, **options)
    got = []
    while True:
        try:
            got.append(next(pieces))
        except StopIteration as end:
            result = end.value
            break
    want = jaxkv.generate(shallow, prompt, **options)
    assert "".join(got) == want.text == result.text
    assert result.tokens == want.tokens
    assert len(got) > 3


def test_characters_of_several_tokens_come_whole(params):
    ids = params.tokenizer.encode("naïve 😀 日本語")
    decode = params.tokenizer.decoder()
    pieces = [decode(token) for token in ids]
    assert "".join(pieces) == "naïve 😀 日本語"
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) > sum(bool(piece) for piece in pieces)


def test_stop_strings_end_a_row_and_are_cut(shallow, story):
    options = {"policy": "h2o", "budget": 32, "max_new_tokens": NEW}
    free = jaxkv.generate(shallow, story[:60], **options)
    stop = free.text[9:14]
    out = jaxkv.generate(shallow, story[:60], stop=["never there", stop], **options)
    assert out.text == free.text[: free.text.index(stop)]
    assert out.tokens == free.tokens[: len(out.tokens)]
    assert len(out.tokens) < NEW
    assert "".join(jaxkv.stream(shallow, story[:60], stop=stop, **options)) == out.text
    batch = jaxkv.generate(shallow, [story[:60], story[100:164]], stop=stop, **options)
    alone = jaxkv.generate(shallow, story[100:164], stop=stop, **options)
    assert batch.text == [out.text, alone.text]
    assert (kept(batch, 0), kept(batch, 1)) == (kept(out), kept(alone))


def test_a_text_without_end_in_the_positions_of_a_short_model(shallow, story):
    config = dataclasses.replace(shallow.config, max_positions=96)
    model = dataclasses.replace(shallow, config=config)
    policy = jaxkv.Streaming(budget=32)
    out = jaxkv.generate(model, story[:300], policy=policy, max_new_tokens=NEW, ignore_eos=True)
    assert out.report.kept == [[32] * 2]
    assert kept(out)[0][0] == [0, 1, 2, 3, *range(291, 319)]
    ranks = np.asarray(out.loop.cache.layers[0].ranks)
    held = np.asarray(out.loop.cache.layers[0].positions) >= 0
    assert sorted(ranks[0, 0][held[0, 0]].tolist()) == list(range(32))
    # A neighbour, long or short, does not change where a row is cut.
    options = {"policy": policy, "max_new_tokens": NEW, "ignore_eos": True}
    both = jaxkv.generate(model, [story[:300], story[100:165]], **options)
    alone = jaxkv.generate(model, story[100:165], **options)
    assert both.tokens == [out.tokens, alone.tokens]
    with pytest.raises(ValueError, match=r"needs 319 positions.*96.*streaming"):
        jaxkv.generate(model, story[:300], policy="h2o", max_new_tokens=NEW)


def test_all_kinds_of_prompts(shallow, golden):
    text, ids = golden["cases"][1]["text"], golden["cases"][1]["token_ids"]
    options = {"max_new_tokens": 4}
    want = jaxkv.generate(shallow, text, **options)
    assert isinstance(want.text, str)
    assert all(isinstance(token, int) for token in want.tokens)
    for prompt in (ids, tuple(ids), np.array(ids), jnp.array(ids)):
        assert jaxkv.generate(shallow, prompt, **options).tokens == want.tokens
    for batch in ([text], [ids], np.array([ids]), [np.array(ids)]):
        assert jaxkv.generate(shallow, batch, **options).tokens == [want.tokens]
    chat = golden["chat"]
    one = jaxkv.generate(shallow, chat["messages"], **options)
    assert one.tokens == jaxkv.generate(shallow, chat["token_ids"], **options).tokens
    many = jaxkv.generate(shallow, [chat["messages"], chat["messages"]], **options)
    assert many.tokens == [one.tokens] * 2


def test_the_report_says_what_is_in_the_cache(shallow, story):
    prompts = [story[:100], story[:29]]
    out = jaxkv.generate(shallow, prompts, policy="h2o", budget=0.29, max_new_tokens=NEW)
    report = out.report
    # Rounded, not cut: 0.29 * 100 is 28.999... in floating point.
    assert report.budget == [29, 8]
    assert report.split == {"heavy": [14, 4], "recent": [15, 4]}
    assert report.kept == [[29] * 2, [8] * 2]
    assert report.evicted == [[100 + NEW - 1 - 29] * 2, [29 + NEW - 1 - 8] * 2]
    leaves = jax.tree.leaves(out.loop.cache)
    assert report.cache_bytes == sum(np.asarray(leaf).nbytes for leaf in leaves)
    tokens = 100 + 29 + 2 * (NEW - 1)
    assert report.full_bytes == tokens * 2 * 2 * 3 * 64 * 4
    assert "29/8 tokens (heavy 14/4, recent 15/4)" in str(report)
    assert any("a fraction of a short prompt" in note for note in report.notes)


def test_new_lengths_do_not_compile_anew(shallow, story):
    options = {"policy": "h2o", "budget": 0.3, "max_new_tokens": 4}
    jaxkv.generate(shallow, story[:100], **options)
    programs = loops.read_first.program._cache_size(), loops.decode.program._cache_size()
    clock = CompileClock()
    jaxkv.generate(shallow, story[:97], **options)
    jaxkv.generate(shallow, story[:103], **options | {"max_new_tokens": 5})
    assert (loops.read_first.program._cache_size(), loops.decode.program._cache_size()) == programs
    assert clock.seconds < 1


def test_the_policy_of_the_readme(shallow, story, monkeypatch):
    monkeypatch.setattr(base, "_REGISTRY", registered())
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", readme, re.S) if "@jaxkv.reg" in c]
    definition = code.split("\n\n# use it")[0]
    assert len(definition.splitlines()) <= 25
    space: dict = {}
    exec(definition, space)
    assert "norms" in registered()
    out = jaxkv.generate(shallow, story[:100], policy="norms", budget=30, max_new_tokens=NEW)
    assert out.report.kept == [[30] * 2]
    assert kept(out)[0][0] != list(range(89, 119)), "it keeps more than a window"
