"""Drawing tokens against slow oracles that are written from the published rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.sampling import Sampling, next_token, row_keys, sampling

VOCAB, ROWS, DRAWS = 12, 4, 4000
#: Rows of different spread, so that the options cut at different places.
LOGITS = np.random.default_rng(5).normal(size=(ROWS, VOCAB)).astype(np.float32)
LOGITS *= np.array([[0.3], [1.0], [2.0], [5.0]], np.float32)


def softmax(logits):
    exp = np.exp(np.float64(logits) - np.max(logits))
    return exp / exp.sum()


def oracle(logits, *, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The distribution that tokens are drawn from: one row, token by token."""
    logits = np.float64(logits) / temperature
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    kept = order[:top_k]
    if top_p is not None:
        probabilities = softmax([logits[token] for token in kept])
        nucleus, total = [], 0.0
        for token, probability in zip(kept, probabilities, strict=True):
            nucleus.append(token)
            total += probability
            if total >= top_p:
                break
        kept = nucleus
    if min_p is not None:
        probabilities = softmax(logits)
        kept = [token for token in kept if probabilities[token] >= min_p * probabilities.max()]
    result = np.zeros(len(logits))
    result[kept] = softmax([logits[token] for token in kept])
    return result


#: One key per draw and row, made once.
KEYS = functools.cache(lambda: jax.random.split(jax.random.key(0), DRAWS * ROWS))


def frequencies(options, logits=LOGITS, used=None):
    """How often each token was drawn, [row, token]."""
    many, keys = np.repeat(logits, DRAWS, 0), KEYS()[: DRAWS * len(logits)]
    used = None if used is None else jnp.repeat(used, DRAWS, 0)
    tokens = next_token(jnp.asarray(many), sampling(**options), keys, used)[0]
    rows = np.asarray(tokens).reshape(-1, DRAWS)
    return np.stack([np.bincount(row, minlength=logits.shape[1]) for row in rows]) / DRAWS


def assert_drawn_from(expected, found):
    # Five standard deviations of a binomial, and a few tokens, for the rare ones.
    bound = 5 * np.sqrt(expected * (1 - expected) / DRAWS) + 5 / DRAWS
    assert (np.abs(found - expected) <= bound).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 1000},
        {"top_p": 0.05},
        {"top_p": 0.7},
        {"top_p": 1.0},
        {"min_p": 0.2},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"top_k": 6, "top_p": 0.6, "min_p": 0.1, "temperature": 1.5},
    ],
    ids=str,
)
def test_draws_follow_the_rules(options):
    options = {"temperature": 1.0} | options
    expected = np.stack([oracle(row, **options) for row in LOGITS])
    found = frequencies(options)
    assert not found[expected == 0].any(), "drew a token that the options exclude"
    assert found[expected > 0.01].all(), "never drew a token that the options allow"
    assert_drawn_from(expected, found)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 10.0])
def test_repetition_penalty(penalty):
    used = np.random.default_rng(1).random((ROWS, VOCAB)) < 0.5
    penalised = LOGITS.copy()
    for row in range(ROWS):
        for token in range(VOCAB):
            if used[row, token]:
                value = LOGITS[row, token]
                penalised[row, token] = value / penalty if value > 0 else value * penalty
    expected = np.stack([oracle(row) for row in penalised])
    used = jnp.asarray(used)
    found = frequencies({"temperature": 1.0, "repetition_penalty": penalty}, used=used)
    assert_drawn_from(expected, found)
    # Greedy choices feel it too; log-probabilities are the model's own.
    options = sampling(repetition_penalty=penalty)
    token, logprob = next_token(jnp.asarray(LOGITS), options, row_keys(0, ROWS), used)
    assert token.tolist() == penalised.argmax(-1).tolist()
    own = [np.log(softmax(row))[i] for row, i in zip(LOGITS, token.tolist(), strict=True)]
    np.testing.assert_allclose(logprob, own, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.5}])
def test_temperature_zero_is_greedy(options):
    tied = LOGITS.copy()
    tied[0, [3, 7]] = 9.0
    options = sampling(temperature=0.0, **options)
    assert options == Sampling(), "options that only draws use cost nothing"
    token, logprob = next_token(jnp.asarray(tied), options, row_keys(0, ROWS), None)
    assert token.tolist() == tied.argmax(-1).tolist()
    assert token.dtype == jnp.int32
    np.testing.assert_allclose(logprob, [np.log(softmax(row).max()) for row in tied], rtol=1e-5)


def test_ties_at_the_edge_of_top_k_and_top_p_keep_the_most_likely():
    logits = jnp.array([[2.0, 1.0, 1.0, 0.0]])
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        found = frequencies({"temperature": 1.0, **options}, np.asarray(logits))
        assert found[0, 0] == 1.0


def test_the_same_seed_draws_the_same():
    options = sampling(temperature=1.0)
    logits = jnp.zeros((ROWS, 1000), jnp.float32)

    def drawn(seed, rows=ROWS):
        return next_token(logits[:rows], options, row_keys(seed, rows), None)[0].tolist()

    alike = drawn(7)
    assert alike == drawn(7)
    assert len(set(alike)) == 1, "an int seeds every row alike"
    assert drawn(7, rows=1) == alike[:1], "a row does not depend on its neighbours"
    assert drawn([7, 8, 9, 10])[0] == alike[0]
    assert drawn([7, 8, 9, 10]) == [drawn(seed, rows=1)[0] for seed in (7, 8, 9, 10)]
    assert len(set(drawn([7, 8, 9, 10]))) > 1


@pytest.mark.parametrize("seed", [[], [1], [1, 2, 3]])
def test_as_many_seeds_as_rows(seed):
    with pytest.raises(ValueError, match=r"seed must be .* \(2\), got \[.*\]"):
        row_keys(seed, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_k", -3),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("nan")),
    ],
)
def test_values_out_of_range(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got {value}$"):
        sampling(**{name: value})


def test_other_values_do_not_recompile():
    traces = []

    @jax.jit
    def draw(options):
        traces.append(options)
        return next_token(jnp.asarray(LOGITS), options, row_keys(0, ROWS), None)[0]

    for temperature, top_p in ((0.5, 0.1), (1.0, 0.5), (2.0, 1.0)):
        draw(sampling(temperature=temperature, top_p=top_p))
    assert len(traces) == 1
