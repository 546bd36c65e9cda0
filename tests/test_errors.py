"""What cannot work is refused before anything runs, in one line that says what was given."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import jaxkv
from jaxkv.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("annotations_unchecked")

IDS = [5, 6, 7]
NAN = float("nan")
CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="session")
def opt():
    return jaxkv.load(Path(__file__).parent / "checkpoints" / "opt")


@pytest.fixture(scope="session")
def texts(small):
    """The small model with a tokenizer of single letters and without a chat template."""
    backend = Backend(WordLevel({letter: i for i, letter in enumerate("abcdefgh")}, "a"))
    backend.pre_tokenizer = Whitespace()
    return dataclasses.replace(small, tokenizer=Tokenizer(backend))


@pytest.fixture(scope="session")
def before(small):
    """A generation to go on after."""
    return jaxkv.generate(small, IDS, policy="window", budget=50, max_new_tokens=1)


def refused(match, call, *args, **options):
    with pytest.raises(ValueError, match=match) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)


def test_a_budget_above_the_prompt_is_fine(before):
    report = before.report
    assert report.budget == [50]
    assert report.evictions == 0
    assert any("nothing was evicted" in note and "50" in note for note in report.notes)
    assert "nothing was evicted" in str(report)


@pytest.mark.parametrize("policy", ["full", "window", "streaming", "h2o", "heavy", "random"])
@pytest.mark.parametrize("budget", [0, -1, 1.5, 0.0, True, "x", NAN, [3]], ids=str)
def test_budget(small, policy, budget):
    match = r"^budget must be an int >= 1 or a float in \(0, 1\], got "
    if not isinstance(budget, list):
        match += rf"'?{budget}'?$"
    refused(match, jaxkv.generate, small, IDS, policy=policy, budget=budget)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"policy": "h20"}, r"unknown policy 'h20' \(did you mean 'h2o'\?\); policies: full, "),
        ({"policy": "Windows"}, r"did you mean 'window'\?"),
        ({"policy": "?"}, r"unknown policy '\?'; policies: full, window"),
        ({"policy": 3}, r"policy must be a name or a jaxkv.Policy, got 3"),
        ({"policy": jaxkv.H2O}, r"policy must be a name or a jaxkv.Policy, got <class"),
        ({"policy": "streaming", "budget": 4}, r"a budget of 4 is below .*at least 5 tokens"),
        (
            {"policy": "streaming", "budget": 0.5},
            r"a budget of 0.5 of a prompt of 3 tokens is 2, which is below .*at least 5 tokens",
        ),
        (
            {"policy": jaxkv.H2O(heavy=2, recent=2), "budget": 4},
            r"give a budget or both of its parts, not all three.*heavy=2, recent=2",
        ),
        ({"max_new_tokens": 0}, r"max_new_tokens must be an int >= 1, got 0"),
        ({"max_new_tokens": -1}, r"max_new_tokens must be an int >= 1, got -1"),
        ({"max_new_tokens": 2.5}, r"max_new_tokens must be an int >= 1, got 2.5"),
        ({"max_new_tokens": True}, r"max_new_tokens must be an int >= 1, got True"),
        ({"stop": ""}, r"stop must be a non-empty string or several, got ''"),
        ({"stop": ["a", ""]}, r"stop must be a non-empty string or several, got \['a', ''\]"),
        ({"stop": "a"}, r"stop strings need a tokenizer"),
        ({"seed": [1, 2]}, r"one int per prompt \(1\), got \[1, 2\]"),
        ({"seed": []}, r"one int per prompt \(1\), got \[\]"),
        ({"stop": 3}, r"stop must be a non-empty string or several, got 3"),
        ({"seed": 1.5}, r"seed must be .*, got 1.5"),
        ({"seed": None}, r"seed must be .*, got None"),
        ({"temperature": -1}, r"temperature must be >= 0 .*got -1"),
        ({"top_k": 2.5}, r"top_k must be an int >= 1 .*, got 2.5"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    ],
    ids=str,
)
def test_options(small, options, match):
    refused(match, jaxkv.generate, small, IDS, **options)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], r"prompt must be .*, got \[\]"),
        ((), r"prompt must be .*, got \(\)"),
        (np.array([], np.int32), r"the prompt is empty"),
        ([IDS, []], r"prompt 1 of the batch is empty: give at least one token"),
        ([[]], r"prompt 0 of the batch is empty"),
        ([64], r"the prompt holds token id 64; the vocabulary has ids 0 to 63"),
        ([1, -1], r"the prompt holds token id -1; the vocabulary has ids 0 to 63"),
        ([IDS, [99]], r"prompt 1 of the batch holds token id 99"),
        (np.array([[1, 2], [3, 64]]), r"prompt 1 of the batch holds token id 64"),
        (None, r"prompt must be .*, got None"),
        (3.5, r"prompt must be .*, got 3.5"),
        (np.float64(3.5), r"prompt must be .*, got .*3.5"),
        (np.array([1.5, 2.0]), r"must be .*, got .*1.5"),
        (b"\x05\x06", r"prompt must be .*, got b'"),
        ([1, 2.5], r"prompt 0 of the batch must be .*, got 1$"),
        ([IDS, 3], r"prompt 1 of the batch must be .*, got 3$"),
        ([[IDS]], r"prompt 0 of the batch must be"),
        ([{"role": "user"}], r"prompt 0 of the batch must be .*got \{'role': 'user'\}"),
        ("a b", r"llama3 has no tokenizer: give token ids"),
        ([IDS, "a"], r"has no tokenizer"),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [jaxkv.generate, jaxkv.stream, jaxkv.perplexity])
def test_prompts(small, call, prompt, match):
    refused(match, call, small, prompt)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("", r"the prompt is empty: give at least one token"),
        (["a", ""], r"prompt 1 of the batch is empty"),
        (["a", 3], r"prompt 1 of the batch must be .*got 3"),
        (CHAT, r"no chat template: give the prompt as a string"),
        ([CHAT, CHAT], r"no chat template"),
    ],
    ids=str,
)
@pytest.mark.parametrize("call", [jaxkv.generate, jaxkv.stream, jaxkv.perplexity])
def test_prompts_of_text(texts, call, prompt, match):
    refused(match, call, texts, prompt)


@pytest.mark.parametrize(
    ("length", "options", "match"),
    [
        (2049, {"max_new_tokens": 1}, r"needs 2049 positions, .*llama3 has 2048: .*lm_infinite$"),
        (2040, {"max_new_tokens": 10}, r"needs 2049 positions.*fewer new tokens"),
        (2049, {"policy": "h2o"}, r"shorten it .*or use positions='rolling' or a .*: streaming"),
        (
            2049,
            {"policy": jaxkv.Streaming(positions="original")},
            r"shorten it .*or use positions='rolling'",
        ),
        (
            2049,
            {"policy": "streaming", "budget": 2047},
            r"2047 tokens and blocks of 512 .*at most 1536",
        ),
    ],
    ids=str,
)
def test_positions(small, length, options, match):
    refused(match, jaxkv.generate, small, [1] * length, **options)


def test_positions_of_models_without_rotary_embeddings(opt):
    refused(
        r"has 128: shorten it or ask for fewer new tokens$",
        jaxkv.generate,
        opt,
        [1] * 129,
        max_new_tokens=1,
    )
    match = r"rolling positions, which need rotary embeddings"
    refused(rf"{match}.*use positions='original'", jaxkv.generate, opt, IDS, policy="streaming")
    refused(match, jaxkv.perplexity, opt, IDS, policy="streaming")


@pytest.mark.parametrize(
    ("policy", "options", "match"),
    [
        (jaxkv.Streaming, {"budget": 8, "sinks": 8}, r"a budget of 8 is below .*at least 9"),
        (jaxkv.Streaming, {"sinks": -1}, r"sinks must be an int >= 0, got -1"),
        (jaxkv.Streaming, {"sinks": True}, r"sinks must be an int >= 0, got True"),
        (jaxkv.Streaming, {"sinks": 1.5}, r"sinks must be an int >= 0, got 1.5"),
        (jaxkv.Streaming, {"positions": "x"}, r"positions must be one of .*rolling.*got 'x'"),
        (jaxkv.H2O, {"budget": 2, "heavy": 1, "recent": 1}, r"not all three: .*heavy=1, recent=1"),
        (jaxkv.H2O, {"heavy": 0, "recent": 0}, r"heavy and recent are both 0"),
        (jaxkv.H2O, {"heavy": 0.0, "recent": 0}, r"heavy and recent are both 0"),
        (jaxkv.H2O, {"heavy": -1, "recent": 3}, r"heavy must be an int >= 0 .*got -1"),
        (jaxkv.H2O, {"heavy": 1.5, "recent": 3}, r"heavy must be .*float in \[0, 1\], got 1.5"),
        (jaxkv.H2O, {"heavy": 2, "recent": True}, r"recent must be .*got True"),
        (jaxkv.H2O, {"heavy": NAN, "recent": 0.1}, r"heavy must be .*got nan"),
        (jaxkv.H2O, {"budget": 4, "heavy": 5}, r"heavy=5 exceeds the budget of 4"),
        (jaxkv.H2O, {"budget": 0.2, "recent": 0.3}, r"recent=0.3 exceeds the budget of 0.2"),
        (jaxkv.H2O, {"budget": 20, "recent": 0.3}, r"recent=0.3 is a fraction .*budget=20"),
        (jaxkv.H2O, {"mode": "x"}, r"mode must be one of \('real_drop', .*\), got 'x'"),
    ],
    ids=str,
)
def test_policies(policy, options, match):
    refused(match, policy, **options)


def test_stream(small, texts):
    refused(r"stream takes one prompt, got 2; use generate", jaxkv.stream, texts, ["a", "b"])
    refused(r"has no tokenizer: use generate", jaxkv.stream, small, IDS)
    for name in ("budgett", "logprobs"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            jaxkv.stream(texts, "a", **{name: 1})


def test_perplexity(small):
    refused(r"at least 2 tokens, got 1", jaxkv.perplexity, small, [1])
    refused(r"perplexity takes one text, got 2", jaxkv.perplexity, small, [IDS, IDS])
    match = r"needs 2049 positions, .*llama3 has 2048: .*streaming"
    refused(match, jaxkv.perplexity, small, [1] * 2050)
    refused(r"unknown policy 'h20' \(did", jaxkv.perplexity, small, IDS, policy="h20")
    refused(r"budget must be .*, got 2.5", jaxkv.perplexity, small, IDS, policy="h2o", budget=2.5)


@pytest.mark.parametrize(
    ("prompt", "options", "match"),
    [
        ([IDS, IDS], {}, r"`after` holds 1 sequences, got 2 prompts"),
        (
            IDS,
            {"policy": "h2o"},
            r"made under Window\(budget=50\), .*cannot change, got policy='h2o'",
        ),
        (IDS, {"policy": jaxkv.Window(49)}, r"cannot change, got policy=Window\(budget=49"),
        (IDS, {"budget": 9}, r"policy and budget cannot change, got policy=None, budget=9"),
        ([], {}, r"prompt must be .*, got \[\]"),
        ([1] * 2048, {}, r"needs 2179 positions"),
        (IDS, {"seed": [1, 2]}, r"one int per prompt \(1\), got \[1, 2\]"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_after(small, before, prompt, options, match):
    refused(match, jaxkv.generate, small, prompt, after=before, **options)


def test_after_another_model(opt, before):
    refused(r"`after`", jaxkv.generate, opt, IDS, after=before, max_new_tokens=1)
