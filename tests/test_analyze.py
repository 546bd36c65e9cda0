"""Which heads retrieve, and predictors of KVzip's scores: on cases whose outcome can be computed by
hand. The models are random and small."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.analyze import fit_surrogate, retrieval_heads, retrieval_scores
from jaxkv.analyze.heads import Copying
from jaxkv.analyze.surrogate import Sums
from jaxkv.attention import attend_block
from jaxkv.cache import UNBOUNDED
from jaxkv.policies import DuoAttention, KVzap, KVzip, Surrogate
from jaxkv.prefill import judged_cache, read
from jaxkv.room import plan

pytestmark = pytest.mark.usefixtures("compiled_quickly")

LENGTH = 24


@pytest.fixture(scope="module")
def even(small):
    """`small` with queries of zero: all heads attend evenly to all they see."""
    zero = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if "q_proj" in jax.tree_util.keystr(path) else x,
        small.state,
    )
    return dataclasses.replace(small, state=zero)


def test_copying_equals_numpy():
    # Long enough to be computed in several blocks and causal parts.
    kv_heads, group, t, dim, distance = 2, 3, 512, 8, 200
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=shape).astype(np.float32)
        for shape in (
            (1, kv_heads, group, t, dim),
            (1, kv_heads, t, dim),
            (1, kv_heads, dim, t),
        )
    )
    real = np.arange(t) < 490
    positions = np.where(real, np.arange(t), -1)[None].astype(np.int32)
    _, (found,) = attend_block(
        jnp.array(q),
        jnp.array(positions),
        jnp.array(k),
        jnp.array(v),
        jnp.broadcast_to(positions[:, None], (1, kv_heads, t)),
        window=None,
        statistics=(Copying(distance),),
        layer=jnp.int32(0),
    )
    expected = np.zeros((kv_heads, t))
    for head in range(kv_heads):
        for row in range(distance, 490):
            logits = q[0, head, :, row] @ k[0, head, : row + 1].T / np.sqrt(dim)
            weights = np.exp(logits)
            weights /= weights.sum(-1, keepdims=True)
            there = weights[:, row - distance] + weights[:, row - distance + 1]
            expected[head, row] = there.max()
    np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-7)


def test_scores_of_even_attention(even):
    # The token at position p sees p + 1 tokens, two of which are those it would copy.
    expected = np.mean([2 / (p + 1) for p in range(LENGTH, 2 * LENGTH)])
    scores = retrieval_scores(even, length=LENGTH, repeats=3)
    assert scores.shape == (3, 2)
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_heads_are_the_best_by_score(small):
    scores = retrieval_scores(small, length=LENGTH, repeats=3)
    np.testing.assert_array_equal(scores, retrieval_scores(small, length=LENGTH, repeats=3))
    assert (scores != retrieval_scores(small, length=LENGTH, repeats=3, seed=1)).all()
    for share, count in ((0.5, 3), (0.2, 1), (1.0, 6)):
        heads = retrieval_heads(small, share=share, length=LENGTH, repeats=3)
        least = np.sort(scores, axis=None)[-count]
        np.testing.assert_array_equal(heads, scores >= least)
    policy = DuoAttention(budget=8, sinks=2, retrieval=heads)
    assert (policy.budgets(40, 3, 2) == UNBOUNDED).all()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"share": 0}, "share must be a number in (0, 1], got 0"),
        ({"share": 1.5}, "share must be a number in (0, 1], got 1.5"),
        ({"length": 1}, "length must be an int >= 2, got 1"),
        ({"repeats": 0}, "repeats must be an int >= 1, got 0"),
        ({"length": 1025}, "the text needs 2050 positions"),
    ],
)
def test_heads_say_what_is_wrong(small, options, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        retrieval_heads(small, **options)


def linear(rng, tokens, layers=2, count=6, targets=3):
    x = rng.normal(size=(layers, tokens, count)) * 10.0 ** np.arange(-2, count - 2)
    x[..., -1] = 1
    weights = rng.normal(size=(layers, count, targets))
    return x, weights, x @ weights


def test_ridge_finds_what_is_linear():
    x, weights, y = linear(np.random.default_rng(0), 40)
    sums = Sums.of(x[:, :13], y[:, :13]) + Sums.of(x[:, 13:], y[:, 13:])
    np.testing.assert_allclose(sums.solve(1e-9), weights, rtol=1e-5)
    assert sums.explained(weights) == pytest.approx(1)
    # Without features the constant is all there is, and the mean explains nothing.
    mean = np.zeros_like(weights)
    mean[:, -1] = y.mean(1)
    np.testing.assert_allclose(sums.solve(1e9), mean, atol=1e-4)
    assert sums.explained(mean) == pytest.approx(0, abs=1e-9)
    noisy = y + np.random.default_rng(1).normal(size=y.shape)
    sums = Sums.of(x, noisy)
    fitted = sums.solve(1e-9)
    residual = ((noisy - x @ fitted) ** 2).sum() / ((noisy - noisy.mean(1)[:, None]) ** 2).sum()
    assert sums.explained(fitted) == pytest.approx(1 - residual)


def test_ridge_bears_features_that_never_change():
    x, _, y = linear(np.random.default_rng(0), 40)
    x[..., 0], x[..., 1] = 0, 7
    assert np.isfinite(Sums.of(x, y).solve(1e-3)).all()


def test_a_surrogate_predicts_what_kvzip_found(small):
    # Fewer tokens than features, all different: the fit goes through every token, so that KVzap's
    # numbers are the logs of KVzip's scores, if both see the same keys, values and heads.
    text = np.random.default_rng(0).permutation(64)[:24].tolist()
    surrogate = fit_surrogate(small, [text], regularisation=1e-9)
    assert surrogate.weights.shape == (3, 2 * 2 * 8 + 1, 2)
    assert np.isnan(surrogate.explained)
    _, judged = judged_cache(small, KVzip(budget=1.0), [text])
    policy = KVzap(budget=len(text) + 1, recent=1, surrogate=surrogate)
    _, predicted = read(small, plan(small, policy, [len(text)], new=len(text), grow=0), [text])
    for zipped, zapped in zip(judged.layers, predicted.layers, strict=True):
        order = np.argsort(np.asarray(zapped.positions)[0, 0])
        order = order[np.asarray(zapped.positions)[0, 0, order] >= 4]
        truth = np.log(np.asarray(zipped.scores)[0, :, 4 : len(text)])
        np.testing.assert_allclose(np.asarray(zapped.traits)[0][:, order], truth, atol=1e-3)


def test_surrogates_are_compared_by_content(small, tmp_path):
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, 64, length).tolist() for length in (20, 23, 21, 18, 24)]
    surrogate = fit_surrogate(small, texts)
    assert surrogate.explained <= 1
    again = fit_surrogate(small, texts)
    assert surrogate == again
    assert hash(surrogate) == hash(again)
    assert surrogate != fit_surrogate(small, texts[:4])
    surrogate.save(tmp_path / "surrogate.npz")
    loaded = Surrogate.load(tmp_path / "surrogate.npz")
    assert loaded == surrogate
    assert loaded.explained == surrogate.explained
    policy = KVzap(budget=12, recent=4, sinks=2, surrogate=surrogate)
    outs = [
        jaxkv.generate(small, texts[0], policy=chosen, max_new_tokens=4, ignore_eos=True).tokens
        for chosen in (policy, dataclasses.replace(policy, surrogate=loaded))
    ]
    assert outs[0] == outs[1]


@pytest.mark.parametrize(
    ("texts", "options", "told"),
    [
        ([], {}, "texts must be a list of at least one text, got []"),
        ("a text", {}, "texts must be a list of at least one text, got 'a text'"),
        ([5, 6, 7, 8, 9, 10], {}, "texts must be a list of texts, got one: [5, 6, 7, 8, 9, 10]"),
        ([[5] * 9, [5, 6, 7, 8]], {}, "each text must have at least 5 tokens, got one of 4"),
        ([[5] * 1100], {}, "kvzip has a prompt of 1100 tokens looked at by 1100 more"),
        ([[5] * 9], {"regularisation": 0}, "regularisation must be a number > 0, got 0"),
        ([[5] * 9], {"chunk": 1}, "chunk must be an int >= 2, got 1"),
    ],
)
def test_fitting_says_what_is_wrong(small, texts, options, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        fit_surrogate(small, texts, **options)
