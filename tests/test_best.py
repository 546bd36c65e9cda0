"""The library's own rule: rates instead of sums, budgets by a profile, and how that is measured."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv.analyze import fit_profile
from jaxkv.policies import Best, Tokens
from jaxkv.policies.best import known_profile, share_out

STORY = json.loads((Path(__file__).parent / "story_perplexity.json").read_text(encoding="utf-8"))


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    shares=st.lists(st.lists(st.floats(0.01, 9), min_size=3, max_size=3), min_size=1, max_size=6),
    budget=st.integers(1, 500),
)
def test_shares_are_whole_and_sum_to_the_budget(shares, budget):
    profile = np.array(shares)
    found = share_out(profile, budget)
    assert found.sum() == budget * profile.size
    assert found.min() >= 1
    # In a layer who needs more gets no less, and layers have whole quarters of the average.
    for need, got in zip(profile, found, strict=True):
        order = np.argsort(need)
        assert np.all(np.diff(got[order]) >= -1)
    quarters = found.sum(1) / (budget * profile.shape[1] / 4)
    assert np.all(np.abs(quarters - np.round(quarters)) * budget * profile.shape[1] / 4 <= 4)


def test_a_token_counts_by_what_it_received_per_row():
    positions = jnp.array([[[0, 5, 2, 7, -1, 6]]])
    sums = jnp.array([[[8.0, 1.5, 9.0, 0.0, 5.0, 0.0]]])
    nothing = dict.fromkeys(set(Tokens._fields) - {"positions", "scores", "newest", "budget"})
    tokens = Tokens(
        positions=positions,
        scores=sums,
        newest=jnp.array([[[7]]]),
        budget=jnp.array([[[3]]]),
        **nothing,
    )
    worth = np.asarray(Best(3).priority(tokens))[0, 0]
    # The newest 2 of 3 stay; the others have been seen by 8, 3 and 6 rows.
    assert np.isinf(worth[[3, 5]]).all()
    np.testing.assert_allclose(worth[[0, 1, 2]], [1.0, 0.5, 1.5])


def test_the_profile_of_a_model_is_found_by_its_shape(params, small):
    profile = np.array(known_profile(params))
    assert profile.shape == (params.config.num_layers, params.config.num_kv_heads)
    assert profile.mean() == pytest.approx(1, abs=0.01)
    assert known_profile(small) is None
    # Without one, heads share alike.
    out = jaxkv.generate(small, list(range(40)), policy="best", budget=8, max_new_tokens=2)
    assert out.report.kept == [[8, 8, 8]]


def test_a_measured_profile_favours_the_head_that_loses_most(shallow, story):
    profile = fit_profile(shallow, [story], length=96, budget=24)
    table = np.array(profile)
    assert table.shape == (2, 3)
    assert table.mean() == pytest.approx(1, abs=0.01)
    assert fit_profile(shallow, [story], length=96, budget=24) == profile
    policy = Best(24, profile=profile)
    assert policy.budgets(0, 2, 3).sum() == 24 * 6
    layers = Best(24, profile=profile, level="layers")
    assert not layers.pooled
    assert layers.budgets(0, 2, 3).sum() == 24 * 6
    assert np.ptp(layers.budgets(0, 2, 3), axis=1).tolist() == [0, 0]
    with pytest.raises(ValueError, match="profile is for 2 layers of 3 KV heads"):
        policy.budgets(0, 3, 2)


def test_it_is_better_than_h2o(params, story):
    # On a text as short as this one; long ones gain more.
    best = jaxkv.perplexity(params, story, policy="best", budget=STORY["budget"])
    assert STORY["perplexity"]["full"] < best < 0.98 * STORY["perplexity"]["h2o"]


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: Best(8, profile=[[1.0, -1.0]]), "positive numbers"),
        (lambda p: Best(8, profile=[1.0, 2.0]), "one row per layer"),
        (lambda p: Best(8, recent=1.5), r"recent must be a share in \[0, 1\], got 1.5"),
        (lambda p: fit_profile(p, "text"), "list of at least one text"),
        (lambda p: fit_profile(p, [[1, 2, 3]], length=8, budget=4), "needs 8 tokens, one has 3"),
        (lambda p: fit_profile(p, [[1, 2, 3]], length=3, budget=3), "below length=3, got 3"),
    ],
)
def test_errors(small, make, message):
    with pytest.raises(ValueError, match=message):
        make(small)
