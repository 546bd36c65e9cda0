"""MiniCache: against its rule written out in NumPy, token by token."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.extend import new_tokens
from jaxkv.follow import extend_layer
from jaxkv.loops import empty_cache
from jaxkv.shared import lend, settle

pytestmark = pytest.mark.usefixtures("compiled_quickly")
KEEP, TOWARD = 0.3, 0.6
HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 8, 40


@pytest.fixture(scope="module")
def policy(small):
    return jaxkv.MiniCache(jaxkv.PodPlan.every(2, small.config), toward=TOWARD, keep=KEEP)


def distance(a, b):
    """Share of a half turn between two vectors."""
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    return np.arccos(np.clip(cosine, -1, 1)) / np.pi


def direction(a, b):
    u, v = a / np.linalg.norm(a), b / np.linalg.norm(b)
    angle = np.arccos(np.clip(u @ v, -1, 1))
    return (np.sin((1 - TOWARD) * angle) * u + np.sin(TOWARD * angle) * v) / np.sin(angle)


class Pair:
    """One KV head of two layers: for each layer `[token] -> (key, value)` as stored."""

    def __init__(self):
        self.stored = ([], [])
        #: Tokens stored whole, and how far apart they are.
        self.whole = {}

    def read(self, queries, keys, values):
        """Attention of both layers, `[layer, token, query head, dim]`, after new tokens: arrays
        `[layer, token, ...]`.
        """
        before, count = len(self.stored[0]), keys.shape[1]
        outs = np.zeros((2, count, queries.shape[2], queries.shape[3]))
        for layer in range(2):
            self.stored[layer].extend(zip(keys[layer], values[layer], strict=True))
            for t in range(count):
                met = self.stored[layer][: before + t + 1]
                k, v = (np.stack([pair[i] for pair in met]) for i in range(2))
                logits = queries[layer, t] @ k.T / np.sqrt(k.shape[1])
                weights = np.exp(logits - logits.max(-1, keepdims=True))
                outs[layer, t] = weights / weights.sum(-1, keepdims=True) @ v
        for token in range(before, before + count):
            first, second = (self.stored[layer][token] for layer in range(2))
            self.whole[token] = sum(distance(first[i], second[i]) for i in range(2))
        farthest = sorted(self.whole, key=lambda token: (-self.whole[token], token))
        for token in farthest[int(KEEP * (before + count)) :]:
            del self.whole[token]
            both = [self.stored[layer][token] for layer in range(2)]
            common = [direction(both[0][i], both[1][i]) for i in range(2)]
            for layer in range(2):
                self.stored[layer][token] = tuple(
                    common[i] * np.linalg.norm(both[layer][i]) for i in range(2)
                )
        return outs


def test_layers_are_merged_by_the_rule(small, policy):
    """Two sequences of different length, read in two blocks and then one by one."""
    rng = np.random.default_rng(0)
    layers = empty_cache(small, policy, jnp.full((3, 2), 2**30), [SLOTS] * 3).layers[:2]
    pairs = [[Pair() for _ in range(KV_HEADS)] for _ in range(2)]
    seen = np.zeros(2, int)
    blocks = [(13, 9), (5, 4)] + [(1, 1)] * 9
    for number, added in enumerate(blocks):
        t = max(added)
        q, k, v = (rng.normal(size=(2, 2, t, heads, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS))
        # Layers look alike, else there is nothing to merge.
        for x in (k, v):
            x[1] = x[0] + rng.uniform(0.2, 1.5, size=(2, t, 1, 1)) * x[1]
        new = new_tokens(jnp.array(seen), jnp.array(added), t, fresh=number == 0)
        done, outs = [], []
        for index, layer in enumerate(layers):
            arrays = (jnp.array(x[index], jnp.float32) for x in (q, k, v))
            out, layer = extend_layer(
                *arrays, lend(layer, done), new, policy, index=jnp.int32(index)
            )
            outs.append(np.asarray(out))
            done.append(layer)
        layers = settle(done)
        for row, count in enumerate(added):
            for head in range(KV_HEADS):
                own = slice(2 * head, 2 * head + 2)
                want = pairs[row][head].read(
                    q[:, row, :count, own], k[:, row, :count, head], v[:, row, :count, head]
                )
                for index in range(2):
                    np.testing.assert_allclose(
                        outs[index][row, :count, own], want[index], rtol=2e-4, atol=2e-5
                    )
        seen += added
    whole = layers[1].parts[0].whole
    for row in range(2):
        for head in range(KV_HEADS):
            kept = np.asarray(whole.positions[row, head])
            assert sorted(kept[kept >= 0]) == sorted(pairs[row][head].whole)
            assert len(pairs[row][head].whole) == int(KEEP * seen[row]) > 0


def test_whole_batched_and_kept(small, policy, tmp_path):
    """With all tokens whole it is `full`; padding, sessions and bytes are as for any cache."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1, 60, count).tolist() for count in (30, 21)]
    options = {"max_new_tokens": 6, "ignore_eos": True, "logprobs": True}
    full = jaxkv.generate(small, prompts, policy="full", **options)
    plan = policy.plan
    for chunk in (None, 8):
        whole = jaxkv.generate(
            small, prompts, policy=jaxkv.MiniCache(plan, keep=1.0), prefill_chunk=chunk, **options
        )
        np.testing.assert_allclose(whole.logprobs, full.logprobs, atol=1e-5)
    out = jaxkv.generate(small, prompts, policy=policy, **options)
    assert np.abs(np.subtract(out.logprobs, full.logprobs)).max() > 0.01
    alone = jaxkv.generate(small, prompts[1], policy=policy, **options)
    assert alone.tokens == out.tokens[1]
    np.testing.assert_allclose(alone.logprobs, out.logprobs[1], atol=1e-5)

    # Tokens are merged while a text is scored, one by one unless a block is asked for.
    scores = [
        jaxkv.perplexity(small, prompts[0], policy=p, **block)
        for p, block in (("full", {}), (policy, {}), (policy, {"block": 29}))
    ]
    assert abs(scores[1] - scores[0]) > 0.01
    np.testing.assert_allclose(scores[2], scores[0], rtol=1e-5)

    slots, places = out.report.slots[0], int(KEEP * out.report.slots[0]) + 1
    heads = 2 * KV_HEADS
    # Stretches, budget, count; and of whole tokens keys, values, positions, scores, root's slots.
    second = heads * (2 * slots + 2 + places * (2 * DIM + 3) + 2) * 4
    assert out.report.layer_bytes[1] == second
    assert out.report.layer_bytes[0] == full.report.layer_bytes[0]

    session = jaxkv.Session(small, policy=policy)
    session.generate(prompts[0], **options)
    session.save(tmp_path / "kept")
    again = jaxkv.Session.load(tmp_path / "kept", small)
    want, got = (s.generate(prompts[1], **options) for s in (session, again))
    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)


def test_what_a_root_drops_is_gone(small, policy):
    """A pair under H2O has the tokens that its root keeps, whole or merged."""
    over = jaxkv.MiniCache(policy.plan, keep=0.5, of=jaxkv.H2O(12))
    prompt = np.random.default_rng(2).integers(1, 60, 30).tolist()
    session = jaxkv.Session(small, policy=over)
    session.generate(prompt, max_new_tokens=8, ignore_eos=True)
    root, second, _ = session.past.loop.cache.layers
    part = second.parts[0]
    held = np.asarray(root.parts[0].positions[0])
    whole = np.asarray(part.whole.positions[0])
    merged = (held >= 0) & (np.asarray(part.stretch[0, :, 0]) >= 0)
    for head in range(KV_HEADS):
        apart, together = whole[head][whole[head] >= 0], held[head][merged[head]]
        assert sorted([*apart, *together]) == sorted(held[head][held[head] >= 0])
        # Half of what the root stores, of however many it has seen; evicted ones leave fewer.
        assert 0 < len(apart) <= 6 <= len(together)
    assert (np.asarray(second.stored()) == 12).all()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep": 1.5}, r"keep must be a number in \[0, 1\], got 1.5"),
        ({"toward": "far"}, r"toward must be a number in \[0, 1\], got 'far'"),
        ({"of": jaxkv.Streaming(16)}, "cannot be combined with Streaming.*positions are rolling"),
    ],
)
def test_wrong_arguments(policy, options, told):
    with pytest.raises(ValueError, match=told):
        jaxkv.MiniCache(policy.plan, **options)


def test_wrong_plans(small):
    with pytest.raises(ValueError, match=r"plan must be a jaxkv\.PodPlan, got 2"):
        jaxkv.MiniCache(2)
    three = jaxkv.PodPlan.every(3, small.config)
    with pytest.raises(ValueError, match="merges two layers, and the plan has a block of 3: take"):
        jaxkv.MiniCache(three)
    with pytest.raises(ValueError, match="start must be a layer, 0 to 2, got 3"):
        jaxkv.PodPlan.every(2, small.config, start=3)
    assert jaxkv.PodPlan.every(2, small.config, start=1).root == ((0, 0), (1, 1), (1, 1))
