"""Needles are hidden whole and where they should be, and scored as other ways of asking would."""

import math
import re

import numpy as np
import pytest

import jaxkv
from jaxkv.evaluate import needle as module
from jaxkv.evaluate.needle import BEGINNING, Needle, hide, make_needles, needle_grid
from jaxkv.policies import get

pytestmark = pytest.mark.usefixtures("compiled_quickly")

LENGTH = 110
ONE = {"lengths": (LENGTH,), "depths": (0.0, 0.5), "needles": 1}


@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 1])
def test_a_needle_is_whole_at_its_depth(depth):
    needle = Needle((-1, -2, -3, -4), (-1, -2), (-3,))
    context = hide(needle, range(500), 104, depth)
    at = {0: BEGINNING, 0.25: BEGINNING + 21, 0.5: BEGINNING + 42, 1: 100}[depth]
    assert context[at : at + 4] == [-1, -2, -3, -4]
    assert context[:at] + context[at + 4 :] == list(range(100))


def test_needles_ask_for_what_they_hide(shallow):
    needles = make_needles(shallow, 16, seed=1)
    for needle in needles:
        sentence, question, answer = map(
            shallow.tokenizer.decode, (needle.sentence, needle.question, needle.answer)
        )
        place, word = re.fullmatch(
            r"\n\nThe secret word of (\w+): (\w+)", question + answer
        ).groups()
        assert sentence == module.SENTENCE.format(place=place, word=word)
        assert question.endswith(":")
        assert needle.sentence[: len(needle.question)] == needle.question
    assert len({needle.answer for needle in needles}) == 16
    assert make_needles(shallow, 16, seed=1) == needles != make_needles(shallow, 16, seed=2)


def logprob(params, ids, prompt, policy, budget):
    """Sum of the log-probabilities of what follows a prompt."""
    found = jaxkv.perplexity(params, ids, policy=policy, budget=budget, prompt=prompt)
    return -math.log(found) * (len(ids) - prompt)


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_log_probabilities_are_those_of_the_text(shallow, story, policy):
    chosen = get(policy, 40)
    (needle,) = make_needles(shallow, 1)
    question, answer = list(needle.question), list(needle.answer)
    straw = story[:LENGTH]
    context = hide(needle, straw, LENGTH - len(question) - len(answer), 0.5)
    text = context + question + answer
    want = {
        True: logprob(shallow, text, len(context + question), chosen, None),
        # The token after the prompt is predicted with the compressed cache in both.
        False: logprob(shallow, text, len(context) + 1, chosen, None)
        - logprob(shallow, text[: -len(answer)], len(context) + 1, chosen, None),
    }
    found = {}
    for aware in (True, False):
        grid = needle_grid(shallow, straw, policy=chosen, aware=aware, **ONE)
        found[aware] = grid.logprobs[0][1] * len(answer)
        assert found[aware] == pytest.approx(want[aware], abs=2e-3)
        assert grid.kept == (40,)
    # What the question attends to is kept only if it is known.
    assert abs(found[True] - found[False]) > 0.01


def test_nothing_is_lost_under_full(shallow, story):
    grids = [needle_grid(shallow, story, aware=aware, **ONE) for aware in (False, True)]
    np.testing.assert_allclose(grids[0].logprobs, grids[1].logprobs, atol=1e-3)
    assert grids[0].logprob == pytest.approx(np.mean(grids[0].logprobs))


def test_found_is_what_greedy_decoding_says(shallow, story, monkeypatch):
    (needle,) = make_needles(shallow, 1)
    context = hide(needle, story, LENGTH - len(needle.question) - 3, 0.0)
    said = jaxkv.generate(shallow, [*context, *needle.question], max_new_tokens=3).tokens
    for answer, share in ((said, 1.0), ([*said[:2], said[2] + 1], 0.0)):
        other = Needle(needle.sentence, needle.question, tuple(answer))
        monkeypatch.setattr(module, "make_needles", lambda *_, other=other: [other])
        grid = needle_grid(shallow, story[:LENGTH], lengths=[LENGTH], depths=[0], needles=1)
        assert grid.found == ((share,),)
        assert grid.score == share


def test_budgets_are_of_the_context(shallow, story):
    grid = needle_grid(shallow, story, policy="h2o", budget=0.5, aware=True, **ONE)
    (needle,) = make_needles(shallow, 1)
    assert grid.kept == (round(0.5 * (LENGTH - len(needle.question) - len(needle.answer))),)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"depths": (0, 1.5)}, r"depths must be numbers in \[0, 1\], got \(0.0, 1.5\)"),
        ({"lengths": (8,)}, r"lengths must be ints >= \d+, got \(8,\)"),
        ({"lengths": (5000,)}, r"haystack has \d+ tokens, and the longest context takes 5000"),
        ({"needles": 17}, r"needles must be an int from 1 to 16, got 17"),
        ({"policy": jaxkv.H2O(mode="lm_eval")}, r"scores given texts only"),
        ({"policy": "h20"}, r"unknown policy 'h20'"),
    ],
)
def test_errors(shallow, story, options, match):
    with pytest.raises(ValueError, match=match):
        needle_grid(shallow, story, **{**ONE, **options})


def test_a_model_without_a_tokenizer_is_refused(small, story):
    with pytest.raises(ValueError, match="has no tokenizer to write needles with"):
        needle_grid(small, story, **ONE)
