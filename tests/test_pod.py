"""PoD: layers that read each other's keys for distant tokens, against the oracle (`pod_oracle.py`).

The oracle runs every row of a ragged, padded batch alone, layer after layer. Whatever stands in
padding is large, so that a look at it would show.

Mutations tried by hand. The test against the oracle fails if

- groups: a root lends its first group to all; outputs stay in the order of groups
- near: recent one token longer; sinks forgotten, in a block or a step; the ring wraps without them
- ring: slots taken to be in order under eviction; dropped tokens point to slot 0; a block
  overwrites all of it, or reads its stored keys from seat 0; rows that have ended write into it
- followers: values by what was stored before a block; stored ones overwritten; tokens counted
  before a block
- steps: the new token not lent; near logits not put in; the window or the far queries forgotten
- maps: ignored, transposed, those of other heads, or after rotation

and others fail:

- skip: if any query head has enough; gate turned round; decided and not done; all if any does;
  predicted from the near part, or without the queries or the window; of the ring, what is dropped
  or out of sight is seen, values are taken in the order of slots; counted without distant tokens,
  or not summed: far_parts_are_skipped
- columns of other heads, or all: groups_of_heads_see_their_part
- ring or values do not grow: a_larger_cache; slots or budgets of the follower's own layer:
  followers_have; rings as long as all near tokens: bytes
- weights without maps: queries_for_distant_keys; by_number not handed on: cannot_be_shared
- on disk: counts lost, parts in another order, a field of the plan forgotten: on_disk; maps
  forgotten: maps_are_not_part
- plan: not checked: do_not_fit; savings negative, or of keys alone: savings

One cannot be seen: places of the ring for sinks that have not come, which nothing reads.
"""

import dataclasses
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pod_oracle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layers import padded

import jaxkv
from jaxkv import H2O, Full, PoD, PodPlan, Streaming, Window
from jaxkv.cache import LayerCache
from jaxkv.extend import new_tokens
from jaxkv.follow import extend_layer
from jaxkv.generate import Past
from jaxkv.loops import empty_cache, enlarge
from jaxkv.pod.cla import CLA
from jaxkv.pod.texts import returning
from jaxkv.policies import get, registered
from jaxkv.positions import rotary_frequencies
from jaxkv.report import make_report
from jaxkv.room import plan
from jaxkv.shared import Group, lend, settle

pytestmark = pytest.mark.usefixtures("compiled_quickly")

#: Layers, sequences, KV heads, query heads of each; slots of each head.
LAYERS, BATCH, KV_HEADS, GROUP, DIM, SLOTS = 3, 3, 3, 2, 8, 32
HEADS = KV_HEADS * GROUP
THETA = 10000.0
#: Heads 0 and 2 form a group. Head 1 begins a block in their midst, and they end before it does,
#: or with it, so that a layer has a group that follows and one that lends to the same last layer.
APART = ((0, 0, 0), (0, 1, 0), (2, 1, 2))
CROSSED = ((0, 0, 0), (0, 1, 0), (0, 1, 0))
#: One block of all layers and heads.
WHOLE = ((0, 0, 0), (0, 0, 0), (0, 0, 0))
#: Widths of a prompt's block and of any other, and tokens of each row. Rings of up to six tokens
#: go round in the steps; rows pause and end.
FIRST, SECOND = 12, 5
SCHEDULE = [
    (FIRST, (12, 5, 1)),
    (SECOND, (3, 5, 0)),
    *[(1, (1, 1, 1))] * 5,
    (1, (1, 0, 1)),
    (1, (1, 0, 1)),
    (SECOND, (0, 2, 5)),
    (1, (1, 1, 1)),
    (1, (1, 1, 0)),
]
HERE = Path(__file__).parent
OUTPUT = np.random.default_rng(9).normal(size=(5, HEADS * DIM)).astype(np.float32)
MAPS = np.random.default_rng(7).normal(size=(LAYERS, HEADS, DIM, DIM)).astype(np.float32) / 3


def pod(root, sinks, recent, of=None, **options):
    plan = PodPlan(root, num_heads=HEADS, head_dim=DIM)
    return PoD(plan, sinks=sinks, recent=recent, of=of or Full(), **options)


@dataclasses.dataclass(frozen=True)
class Case:
    policy: PoD
    #: The rule for a budget.
    rule: object = lambda n: oracles.Rule("full", n)
    window: int | None = None
    mapped: bool = False
    rotated: bool = False
    #: All layers but the first one follow it whole.
    by_root: bool = False
    slots: int = SLOTS


CASES = {
    "full": Case(pod(CROSSED, 2, 5), mapped=True, rotated=True),
    "h2o": Case(pod(WHOLE, 0, 4, H2O()), lambda n: oracles.Rule("h2o", n, recent=(n + 1) // 2)),
    "streaming": Case(
        pod(WHOLE, 1, 3, Streaming(sinks=2, positions="original")),
        lambda n: oracles.Rule("streaming", n, sinks=2),
        window=9,
        mapped=True,
    ),
    # Less is kept than is near.
    "window": Case(pod(WHOLE, 0, 6, Window()), lambda n: oracles.Rule("window", n)),
}


def test_heads_that_share_with_the_same_layers_form_a_group():
    def groups(root):
        return [pod(root, 2, 5).sharing.groups(layer) for layer in range(LAYERS)]

    assert groups(APART) == [
        (Group((0, 2), 0, 0, True), Group((1,), 0, 1, False)),
        (Group((0, 2), 0, 0, True), Group((1,), 1, 1, True)),
        (Group((0, 2), 2, 0, False), Group((1,), 1, 1, True)),
    ]
    assert groups(CROSSED)[1:] == [(Group((0, 2), 0, 0, True), Group((1,), 1, 1, True))] * 2
    assert groups(WHOLE) == [(Group((0, 1, 2), 0, 0, True),)] * LAYERS


@functools.partial(jax.jit, static_argnames=("policy", "fresh", "window", "rotated"))
def run(q, k, v, far_map, layer, seen, added, policy, fresh, window, rotated):
    """A block or a step through one layer."""
    rotary = rotary_frequencies(DIM, THETA, None) if rotated else None
    new = new_tokens(seen, added, k.shape[1], fresh=fresh, rotary=rotary)
    options = {"index": jnp.int32(0), "window": window, "output": jnp.asarray(OUTPUT)}
    return extend_layer(q, k, v, layer, new, policy, far_map=far_map, **options)


def run_all(case, blocks, layers, seen, added, fresh):
    """A block or a step through all layers, as a model runs them."""
    extended, outs = [], []
    for index, (block, layer) in enumerate(zip(blocks, layers, strict=True)):
        layer = lend(layer, extended)
        far_map, policy = MAPS[index] if case.mapped else None, case.policy
        if case.by_root and index:
            # Followers do not look at what keeps the tokens: the same programs serve all.
            policy = dataclasses.replace(policy, of=Full())
        out, layer = run(
            *block, far_map, layer, seen, added, policy, fresh, case.window, case.rotated
        )
        extended.append(layer)
        outs.append(out)
    return np.stack(outs), settle(extended)


@pytest.fixture(scope="module")
def sized(small):
    """A model of the sizes used here, for what caches look like; it has no such weights."""
    sizes = {"num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    return dataclasses.replace(small, config=dataclasses.replace(small.config, **sizes))


def text(seed, n, spread=2.0):
    """Queries, keys and values of `n` tokens per row: [layers, batch, n, heads, dim]."""
    rng = np.random.default_rng(seed)
    shapes = [(LAYERS, BATCH, n, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [(rng.normal(size=shape) * spread).astype(np.float32) for shape in shapes]


def play(sized, case, arrays, budgets, schedule):
    """Runs blocks, given as (width, added): yields outputs and layers after each."""
    seen = np.zeros(BATCH, np.int32)
    slots = [case.slots] * len(budgets)
    layers = empty_cache(sized, case.policy, jnp.asarray(budgets), slots).layers
    for first, (width, added) in enumerate(schedule):
        added = np.array(added, np.int32)
        blocks = [padded(layer, seen, added, width) for layer in zip(*arrays, strict=True)]
        out, layers = run_all(case, blocks, layers, seen, added, not first)
        seen = seen + added
        yield out, layers


def turned(array):
    """[layers, n, heads, dim] rotated to positions 0 to n - 1."""
    out = np.empty(array.shape)
    for at in np.ndindex(*array.shape[:3]):
        out[at] = oracles.rotate(array[at].astype(np.float64), at[1], THETA)
    return out


def traced(case, arrays, budgets, schedule):
    """The oracle's trace of every row."""
    policy, traces = case.policy, []
    for row in range(BATCH):
        blocks = [added[row] for _, added in schedule if added[row]]
        q, k, v = (a[:, row, : sum(blocks)] for a in arrays)
        far = np.einsum("lthd,lhde->lthe", q, MAPS, dtype=np.float64) if case.mapped else q
        if case.rotated:
            q, k, far = turned(q), turned(k), turned(far)
        rules = [[case.rule(int(n)) for n in layer[row]] for layer in budgets]
        root = [list(layer) for layer in policy.plan.root]
        trace = pod_oracle.run(
            q, k, v, root, policy.sinks, policy.recent, far_queries=far, window=case.window,
            blocks=blocks, rule=rules, skip=policy.skip,
        )  # fmt: skip
        traces.append(trace)
    return traces


def kept(layers, row):
    """Positions that roots store, sorted, and how many followers do: [layer][kv_head]."""
    found = []
    for layer in layers:
        heads = [None] * KV_HEADS
        for group, part in zip(layer.groups, layer.parts, strict=True):
            for at, head in enumerate(group.heads):
                if isinstance(part, LayerCache):
                    positions = np.asarray(part.positions)[row, at]
                    heads[head] = sorted(positions[positions >= 0].tolist())
                else:
                    heads[head] = int(part.count[row, at])
        found.append(heads)
    return found


def check(sized, case, arrays, budgets, schedule, traces):
    """Every row of the batch equals the oracle's trace of it. Gives the layers at the end."""
    seen, step = [0] * BATCH, [-1] * BATCH
    root, layers = case.policy.plan.root, ()
    history = play(sized, case, arrays, budgets, schedule)
    for (_, added), (out, layers) in zip(schedule, history, strict=True):
        for row, trace in enumerate(traces):
            end = seen[row] + added[row]
            got, want = out[:, row, : added[row]], trace.outputs[:, seen[row] : end]
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
            seen[row], step[row] = end, step[row] + bool(added[row])
            stored = [[[]] * KV_HEADS] * len(layers) if step[row] < 0 else trace.kept[step[row]]
            want = [
                [kept if root[i][k] == i else len(kept) for k, kept in enumerate(heads)]
                for i, heads in enumerate(stored)
            ]
            assert kept(layers, row) == want
    return layers


@st.composite
def schedules(draw):
    """A prompt block, perhaps a second one, single steps, a later turn; rows take part or not."""

    def block(width):
        return width, draw(st.tuples(*[st.integers(0, width)] * BATCH))

    schedule = [block(FIRST)]
    for steps in (5, 2):
        if draw(st.booleans()):
            schedule.append(block(SECOND))
        schedule += [block(1) for _ in range(draw(st.integers(0, steps)))]
    return schedule


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(schedule=schedules(), least=st.integers(1, 6), seed=st.integers(0, 2**32 - 1))
@example(schedule=SCHEDULE, least=4, seed=0)
def test_rows_of_a_ragged_batch_equal_the_oracle_alone(sized, name, schedule, least, seed):
    case = CASES[name]
    lengths = [sum(added[row] for _, added in schedule) for row in range(BATCH)]
    arrays = text(seed, max(lengths))
    # Budgets differ by row, layer and head; followers have those of their roots.
    budgets = least + np.arange(BATCH)[:, None] + np.arange(KV_HEADS)
    budgets = budgets + np.arange(LAYERS)[:, None, None]
    budgets = np.take_along_axis(budgets, np.array(case.policy.plan.root)[:, None], 0)
    budgets = budgets.astype(np.int32)
    traces = traced(case, arrays, budgets, schedule)
    check(sized, case, arrays, budgets, schedule, traces)


# Skipping.

#: Prompts, then steps; tokens that come at `SURE` steps are asked for by their own queries.
STEPS = [(FIRST, (12, 9, 11)), *[(1, (1, 1, 1))] * 4, (1, (1, 0, 1)), *[(1, (1, 1, 1))] * 3]
SURE = (1, 2, 4, 6)
SKIPPING = {
    # Near tokens may be out of sight, or dropped, while every slot is in use.
    "exact": Case(pod(APART[:2], 2, 4, skip=("exact", 0.5)), window=9),
    "predicted": Case(
        pod(APART[:2], 2, 4, H2O(), skip=("predicted", 0.5)),
        lambda n: oracles.Rule("h2o", n, recent=(n + 1) // 2),
        window=11,
        slots=10,
    ),
    "exact_never": Case(pod(WHOLE[:2], 2, 4, skip=("exact", 1.001))),
    "predicted_never": Case(pod(WHOLE[:2], 2, 4, skip=("predicted", 1.001))),
}


@pytest.mark.parametrize("name", SKIPPING)
def test_far_parts_are_skipped_where_the_near_part_is_enough(sized, name):
    case, arrays = SKIPPING[name], [array[:2] for array in text(6, 20)]
    tau = case.policy.skip[1]
    never = tau > 1  # no gate is
    when = np.cumsum([added for _, added in STEPS], 0)
    for row, step in itertools.product(range(BATCH), SURE):
        at = when[step, row] - 1
        arrays[0][:, row, at] = np.repeat(arrays[1][:, row, at], GROUP, 1)
    budgets = np.full((2, BATCH, KV_HEADS), 9, np.int32)
    asked = case.policy if not never else dataclasses.replace(case.policy, skip=None)
    traces = traced(dataclasses.replace(case, policy=asked), arrays, budgets, STEPS)
    roots, followers = check(sized, case, arrays, budgets, STEPS, traces)

    assert roots.skipped() is None
    counts = np.asarray(followers.skipped())
    for row, trace in enumerate(traces):
        assert counts[row].sum(0).tolist() == [trace.skipped, trace.far_parts]
    assert counts[..., 1].sum() > 20
    if never:
        assert not counts[..., 0].any()
        return
    # No gate is near to tau, so that rounding decides nothing; and per head they are as counted.
    gates = [
        (row, *at, gate) for row, trace in enumerate(traces) for at, gate in trace.gates.items()
    ]
    assert min(abs(gate - tau) for *_, gate in gates) > 1e-3
    want = np.zeros_like(counts)
    for row, _, head, _, gate in gates:
        want[row, head] += (gate >= tau, 1)
    np.testing.assert_array_equal(counts, want)
    # There are steps at which all rows and heads skip, and some at which a part of them does.
    shares = []
    for step in range(1, len(STEPS)):
        now = [gate >= tau for row, _, _, at, gate in gates if at == when[step, row] - 1]
        shares.append(np.mean(now))
    assert max(shares) == 1
    assert any(0 < share < 1 for share in shares)


# Every policy.

SNAP = jaxkv.SnapKV(window=4)
#: By name: all that are registered, with what short texts need, and some more.
POLICIES = {name: get(name) for name in registered()}
POLICIES |= {
    name: dataclasses.replace(POLICIES[name], window=4) for name in ("snapkv", "pyramidkv", "cake")
}
POLICIES |= {
    "r_kv": jaxkv.RKV(window=4, burst=5),
    "chunkkv": jaxkv.ChunkKV(SNAP),
    "kvzip_uniform": jaxkv.KVzip(level="uniform"),
    "streaming_original": Streaming(sinks=2, positions="original"),
    "compose": jaxkv.Compose(SNAP, H2O()),
    "plus_heavy": jaxkv.plus_heavy(jaxkv.Strided()),
    "plus_heavy_kvzap": jaxkv.plus_heavy(jaxkv.KVzap()),
    "compose_kvzap": jaxkv.Compose(SNAP, jaxkv.KVzap()),
    "pod": pod(WHOLE, 2, 4),
}
#: Which cannot be combined with PoD, and what is said of them.
REFUSED = {
    "streaming": r"its positions are rolling",
    "lm_infinite": r"its positions are ceiling",
    "topk": r"PoD cannot be combined with TopK\(.*which stores every token and reads some",
    "quest": r"PoD cannot be combined with Quest\(.*which stores every token and reads some",
    "adakv": r"AdaKV\(.*heads share a pool of slots",
    "duo_attention": r"heads share a pool of slots",
    "kvzip": r"heads share a pool of slots",
    "kvzip_uniform": r"it cuts a prompt after all layers have read it",
    "cake": r"it cuts a prompt after all layers have read it",
    "kvzap": r"KVzap\(.*it knows the heads of a layer by number",
    "plus_heavy_kvzap": r"it knows the heads of a layer by number",
    "compose_kvzap": r"it knows the heads of a layer by number",
    "best": r"it knows the heads of a layer by number",
    "pod": r"PoD\(.*it shares already",
}
TURN = [(FIRST, (12, 5, 1)), *[(1, (1, 1, 1))] * 4, (1, (1, 0, 1)), *[(1, (1, 1, 1))] * 2]


@pytest.fixture(scope="module")
def whole():
    """Texts for two layers, and what the oracle makes of them when nothing is dropped."""
    arrays = [array[:2] for array in text(5, 19)]
    budgets = np.full((2, BATCH, KV_HEADS), SLOTS - 1, np.int32)
    return arrays, budgets, traced(Case(pod(WHOLE[:2], 2, 4)), arrays, budgets, TURN)


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in REFUSED])
def test_every_policy_may_choose_for_a_block_of_layers(sized, whole, name):
    arrays, budgets, traces = whole
    case = Case(pod(WHOLE[:2], 2, 4, POLICIES[name]), by_root=True)
    check(sized, case, arrays, budgets, TURN, traces)

    # What a follower holds is its own, and of the tokens that its root holds.
    _, keys, values = (array[1] for array in arrays)
    seen = np.zeros(BATCH, int)
    few = np.full_like(budgets, 6)
    for (_, added), (_, layers) in zip(TURN, play(sized, case, arrays, few, TURN), strict=True):
        seen += added
        (root,), (follower,) = layers[0].parts, layers[1].parts
        positions = np.asarray(root.positions)
        row, head, slot = np.nonzero(positions >= 0)
        held = np.asarray(follower.values)[row, head, :, slot]
        np.testing.assert_array_equal(held, values[row, positions[row, head, slot], head])
        np.testing.assert_array_equal(follower.count, (positions >= 0).sum(-1))
        for row in range(BATCH):
            sinks = np.arange(min(2, seen[row]))
            recent = np.arange(max(2, seen[row] - 4), seen[row])
            ring = np.asarray(follower.keys)[row]
            np.testing.assert_array_equal(ring[:, sinks], keys[row, sinks].swapaxes(0, 1))
            at = 2 + (recent - 2) % 4
            np.testing.assert_array_equal(ring[:, at], keys[row, recent].swapaxes(0, 1))
    assert POLICIES[name].evicts == (int(follower.count[0, 0]) < seen[0])


@dataclasses.dataclass(frozen=True)
class Columns(Full):
    """Notes of each token what the output projection is for its head."""

    needs_traits = True

    def trait(self, new):
        sums = new.output.reshape(len(OUTPUT), new.keys.shape[1], -1).sum((0, 2))
        return jnp.broadcast_to(sums[:, None], new.keys.shape[:3])


def test_groups_of_heads_see_their_part_of_the_output_projection(sized):
    arrays, budgets = [array[:1] for array in text(8, FIRST)], np.full((1, BATCH, KV_HEADS), 31)
    case = Case(pod(APART, 2, 4, Columns()))
    ((_, (layer,)),) = play(sized, case, arrays, budgets, [(FIRST, (12, 12, 12))])
    heads = OUTPUT.reshape(len(OUTPUT), KV_HEADS, -1).sum((0, 2))
    assert [group.heads for group in layer.groups] == [(0, 2), (1,)]
    for group, part in zip(layer.groups, layer.parts, strict=True):
        for at, head in enumerate(group.heads):
            np.testing.assert_allclose(part.traits[:, at, :12], heads[head], rtol=1e-5)


# Models.

#: For two layers of three KV heads, as `shallow` has: heads 0 and 2 share.
PLAN = PodPlan(((0, 0, 0), (0, 1, 0)), num_heads=9, head_dim=64)
SHARED = PoD(PLAN, sinks=2, recent=8)
NEW = 6
OPTIONS = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": True}


@pytest.fixture(scope="module")
def prompts(story):
    """Their lengths differ, padded sizes do not, here and below: all run the same programs."""
    return [story[:33], story[100:136], story[200:234]]


@pytest.fixture(scope="module")
def solo(shallow, prompts):
    return jaxkv.generate(shallow, prompts[0], policy=SHARED, **OPTIONS)


@pytest.fixture(scope="module")
def full(shallow, prompts):
    return jaxkv.generate(shallow, prompts[0], policy="full", **OPTIONS)


def assert_same(got, want, atol=1e-5):
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "policy",
    [
        PoD(PodPlan(((0, 0, 0), (1, 1, 1)), 9, 64), sinks=2, recent=8),
        PoD(PLAN, sinks=0, recent=200),
    ],
    ids=["nothing_shared", "all_near"],
)
def test_without_distant_keys_of_others_it_is_full(shallow, prompts, full, solo, policy):
    out = jaxkv.generate(shallow, prompts[0], policy=policy, **OPTIONS)
    assert_same(out, full, atol=1e-6)
    assert np.abs(np.subtract(solo.logprobs, full.logprobs)).max() > 1e-3


def test_a_batch_gives_what_its_rows_give_alone(shallow, prompts, solo):
    batch = jaxkv.generate(shallow, prompts, policy=SHARED, **OPTIONS)
    rows = [solo, *(jaxkv.generate(shallow, p, policy=SHARED, **OPTIONS) for p in prompts[1:])]
    assert batch.tokens == [row.tokens for row in rows]
    np.testing.assert_allclose(batch.logprobs, [row.logprobs for row in rows], rtol=0, atol=1e-4)
    assert batch.report.kept == [row.report.kept[0] for row in rows]


def test_a_prompt_in_pieces_and_a_second_turn_are_one_text(shallow, prompts, solo):
    pieces = jaxkv.generate(shallow, prompts[0], policy=SHARED, prefill_chunk=16, **OPTIONS)
    assert_same(pieces, solo, atol=1e-4)
    turn = jaxkv.generate(shallow, prompts[1][:3], after=solo, **OPTIONS)
    at_once = prompts[0] + solo.tokens + prompts[1][:3]
    assert_same(turn, jaxkv.generate(shallow, at_once, policy=SHARED, **OPTIONS), atol=1e-4)
    assert turn.report.kept == [[len(at_once) + NEW - 1] * 2]


def assert_on_disk_as_it_was(session, params, path):
    session.save(path)
    loaded = jaxkv.Session.load(path, params)
    assert loaded.policy == session.policy
    ours, theirs = (s.past.loop.cache for s in (session, loaded))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for old, new in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(new, old)
        assert new.dtype == old.dtype
    return loaded


def test_a_session_goes_on_to_the_bit_from_disk(shallow, prompts, solo, tmp_path):
    session = jaxkv.Session(shallow, policy=SHARED)
    session.rewind(solo)
    loaded = assert_on_disk_as_it_was(session, shallow, tmp_path / "kept")
    want, got = (s.generate([7, 8], **OPTIONS) for s in (session, loaded))
    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs)


def test_what_was_skipped_and_scores_are_on_disk_and_reported(shallow, solo, tmp_path):
    policy = PoD(PLAN, sinks=2, recent=8, of=H2O(16), skip=("predicted", 0.5))
    cache, count = empty_cache(shallow, policy, jnp.full((2, 1), 16), [32, 32]), iter(range(99))
    cache = jax.tree.map(lambda x: jnp.full_like(x, next(count)), cache)
    follower = cache.layers[1].parts[0]
    follower = dataclasses.replace(follower, skipped=jnp.array([[[3, 4], [0, 2]]], jnp.int32))
    layer = dataclasses.replace(cache.layers[1], parts=(follower, cache.layers[1].parts[1]))
    cache = dataclasses.replace(cache, layers=(cache.layers[0], layer))
    session = jaxkv.Session(shallow, policy=policy)
    loop = dataclasses.replace(solo.loop, cache=cache)
    session.rewind(Past(policy=policy, config=shallow.config, loop=loop))
    assert_on_disk_as_it_was(session, shallow, tmp_path / "kept")

    seconds = dict.fromkeys(("compile", "prefill", "decode"), 0.0)
    report = make_report(
        shallow, policy, cache, prompt_tokens=[9], new_tokens=[2], budgets=[16], first_turn=True,
        seconds=seconds,
    )  # fmt: skip
    assert report.skipped == 3 / 6
    assert "skipped   50% of the distant parts of decode steps" in str(report)
    assert solo.report.skipped is None
    assert "skipped" not in str(solo.report)


def test_followers_that_store_nothing_are_on_disk(shallow, solo, tmp_path):
    session = jaxkv.Session(shallow, policy=CLA(PLAN))
    cache = empty_cache(shallow, session.policy, jnp.full((2, 1), 2**30), [48, 48])
    assert 0 in [leaf.size for leaf in jax.tree.leaves(cache)]
    loop = dataclasses.replace(solo.loop, cache=cache)
    session.rewind(Past(policy=session.policy, config=shallow.config, loop=loop))
    assert_on_disk_as_it_was(session, shallow, tmp_path / "kept")


def test_maps_are_not_part_of_a_session(shallow, tmp_path):
    maps = np.tile(np.eye(64, dtype=np.float32), (2, 9, 1, 1))
    policy = dataclasses.replace(SHARED, plan=dataclasses.replace(PLAN, maps=maps))
    jaxkv.Session(shallow, policy=policy).read([5]).save(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"PoD was made with plan=a plan with maps.*give policy="):
        jaxkv.Session.load(tmp_path / "kept", shallow)
    assert jaxkv.Session.load(tmp_path / "kept", shallow, policy=policy).tokens_seen == 1
    for other in (None, 2 * maps):
        plan = dataclasses.replace(PLAN, maps=other)
        with pytest.raises(ValueError, match="holds a session under"):
            jaxkv.Session.load(
                tmp_path / "kept", shallow, policy=dataclasses.replace(policy, plan=plan)
            )


@pytest.mark.parametrize("family", ["llama3", "gpt_neox", "opt"])
def test_queries_for_distant_keys_are_mapped(family):
    params = jaxkv.load(HERE / "checkpoints" / family)
    config = params.config
    root = [[0] * config.num_kv_heads] * config.num_layers
    shape = (config.num_layers, config.num_heads, config.head_dim, config.head_dim)

    def logprobs(factor):
        maps = np.broadcast_to(factor * np.eye(config.head_dim, dtype=np.float32), shape)
        policy = PoD(PodPlan.for_config(root, config, maps=maps), sinks=1, recent=3)
        options = {"policy": policy, "max_new_tokens": 1, "logprobs": True}
        return jaxkv.generate(params, [5, 9, 7, 3, 8, 4, 6] * 2, **options).logprobs

    assert np.abs(np.subtract(logprobs(-9), logprobs(1))).max() > 1e-4


def test_texts_may_return_to_their_beginning():
    assert returning([[1, 2, 3, 4, 5], (6, 7, 8, 9)], 2) == [[1, 2, 3, 1, 2], [6, 7, 6, 7]]
    with pytest.raises(ValueError, match=r"at least 6 tokens, that 3 may return, and one has 5"):
        returning([[1, 2, 3, 4, 5]], 3)
    with pytest.raises(ValueError, match="count must be an int >= 1, got 0"):
        returning([[1, 2]], 0)


# Memory.


def test_bytes_are_those_of_the_formula(shallow, solo):
    slots, dim, near, tokens = 48, 64, 2 + 8, 33 + NEW - 1
    root = 2 * slots * dim * 4 + slots * 4 + 4 + 4  # keys, values; positions, budget, free
    follower = near * dim * 4 + slots * dim * 4 + 4 + 4  # ring, values; budget, count
    assert solo.report.slots == [slots] * 2
    assert solo.report.layer_bytes == [3 * root, root + 2 * follower]
    assert solo.report.cache_bytes == solo.loop.cache.nbytes == 4 * root + 2 * follower + 4
    assert solo.report.full_bytes == tokens * 2 * 3 * 64 * 4 * 2
    assert solo.report.kept == [[tokens] * 2]

    # Short texts have short rings; and counts are kept where parts are skipped.
    policy = PoD(PLAN, sinks=2, recent=80, skip=("exact", 0.7))
    cache = empty_cache(shallow, policy, jnp.full((2, 1), 2**30), [slots] * 2)
    follower = 2 * slots * dim * 4 + 4 + 4 + 2 * 4
    assert cache.nbytes == 4 * root + 2 * follower + 4


def test_followers_have_the_slots_and_budgets_of_their_roots(shallow):
    of = jaxkv.PyramidKV(40, window=8, beta=4)
    alone = plan(shallow, of, [200], new=209, grow=9)
    policy = PoD(PLAN, sinks=2, recent=8, of=of)
    planned = plan(shallow, policy, [200], new=209, grow=9)
    (high, low), slots = alone.budgets[:, 0, 0], alone.slots
    assert high > low
    assert planned.budgets[:, 0].tolist() == [[high] * 3, [high, low, high]]
    assert planned.slots[0] == slots[0] > slots[1]
    cache = empty_cache(shallow, planned.policy, jnp.array(planned.budgets), slots)
    roots = [2 * count * 64 * 4 + count * 4 + 8 for count in slots]
    follower = (2 + 8) * 64 * 4 + slots[0] * 64 * 4 + 8
    assert cache.nbytes == 3 * roots[0] + roots[1] + 2 * follower + 4


def test_a_larger_cache_holds_what_it_held(shallow):
    # A ring with fewer places than there are near tokens grows with the slots.
    policy, count = PoD(PLAN, sinks=2, recent=80), iter(range(100))
    budgets = jnp.full((2, 1, 3), 2**30, jnp.int32)
    cache = empty_cache(shallow, policy, budgets, [48, 48])
    cache = jax.tree.map(lambda x: jnp.full_like(x, next(count)), cache)
    larger = enlarge(cache, budgets, (96, 96), policy)
    follower = larger.layers[1].parts[0]
    assert follower.keys.shape == (1, 2, 82, 64)
    assert follower.values.shape == (1, 2, 64, 96)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(larger), strict=True):
        if not np.array_equal(new, np.full(new.shape, 2**30)):  # a budget
            np.testing.assert_array_equal(new[tuple(map(slice, old.shape))], old)


# The plan.


def test_a_plan_comes_back_from_its_file(tmp_path):
    rng = np.random.default_rng(3)
    plan = PodPlan(
        APART,
        num_heads=HEADS,
        head_dim=DIM,
        model="made up",
        settings={"threshold": 0.5, "texts": 4},
        similarity=rng.uniform(size=(LAYERS, LAYERS, KV_HEADS)).astype(np.float32),
        maps=MAPS,
    )
    plan.save(tmp_path / "plan.json")
    loaded = PodPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert (loaded.model, loaded.settings) == (plan.model, plan.settings)
    np.testing.assert_allclose(loaded.similarity, plan.similarity, rtol=0, atol=5.1e-5)
    np.testing.assert_array_equal(loaded.maps, plan.maps)
    dataclasses.replace(plan, similarity=None, maps=None).save(tmp_path / "bare.json")
    bare = PodPlan.load(tmp_path / "bare.json")
    assert bare == plan
    assert bare.similarity is bare.maps is None
    assert not (tmp_path / "bare.safetensors").exists()


@pytest.mark.parametrize("root", [APART, CROSSED, WHOLE, tuple((i,) * 3 for i in range(LAYERS))])
def test_savings_are_those_of_the_oracle(root):
    plan = PodPlan(root, num_heads=HEADS, head_dim=DIM)
    assert plan.saving == pod_oracle.nominal_saving(root)
    for length, sinks, recent in [(1, 0, 4), (20, 2, 5), (7, 2, 5), (5000, 16, 4080)]:
        want = pod_oracle.saving(root, length, sinks, recent)
        assert plan.saving_at(length, sinks=sinks, recent=recent) == pytest.approx(want)
    assert plan.saving_at(100) == 0
    shared = sum(root != layer for layer, row in enumerate(root) for root in row)
    assert str(plan).startswith(f"{shared} of 9 heads read another layer's keys")


def test_a_plan_says_which_layers_share():
    *_, first, second, third = str(PodPlan(APART, HEADS, DIM)).splitlines()
    assert first == "KV head 0: layers 0-1, 2"
    assert second == "KV head 1: layers 0, 1-2"
    assert third == "KV head 2: layers 0-1, 2"


# What cannot be. Last: from here on annotations are not checked.


def refused(match, call):
    with pytest.raises(ValueError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("name", REFUSED)
def test_policies_that_cannot_be_shared(name):
    refused(REFUSED[name], lambda: PoD(PLAN, of=POLICIES[name]))


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: PoD(), r"plan must be a jaxkv.PodPlan, got None"),
        (lambda: PoD("plan.json"), r"plan must be a jaxkv.PodPlan, got 'plan.json'"),
        (lambda: PoD(PLAN, sinks=-1), r"sinks must be an int >= 0, got -1"),
        (lambda: PoD(PLAN, recent=0), r"recent must be an int >= 1, got 0"),
        (lambda: PoD(PLAN, recent=8.0), r"recent must be an int >= 1, got 8.0"),
        (lambda: PoD(PLAN, skip=0.7), r"skip must be None or a form \(exact, predicted\).*got 0.7"),
        (lambda: PoD(PLAN, skip=("exact",)), r"a share above 0, such as .*got \('exact',\)"),
        (lambda: PoD(PLAN, skip=("guess", 0.7)), r"skip must be .*got \('guess', 0.7\)"),
        (lambda: PoD(PLAN, skip=("exact", 0)), r"skip must be .*got \('exact', 0\)"),
        (lambda: PoD(PLAN, skip=("exact", True)), r"skip must be .*got \('exact', True\)"),
        (lambda: PoD(PLAN, skip=("exact", "0.7")), r"skip must be .*got \('exact', '0.7'\)"),
        (lambda: PoD(PLAN, positions="rolling"), r"its positions are rolling"),
        (lambda: PoD(PLAN, of="full"), r"PoD wraps a jaxkv.Policy, got 'full'"),
        (lambda: PodPlan((), 9, 64), r"root must have one row per layer, all alike long, got \(\)"),
        (lambda: PodPlan(((0, 0), (0,)), 9, 64), r"root must have one row per layer"),
        (
            lambda: PodPlan(((0,), (2,), (2,)), 9, 64),
            r"the root of layer 1, head 0 is layer 2: it must be .*0 to 1",
        ),
        (lambda: PodPlan(((-1,),), 9, 64), r"the root of layer 0, head 0 is layer -1"),
        (
            lambda: PodPlan(((0,), (1,), (0,)), 9, 64),
            r"layer 2, head 0 reads the keys of layer 0, and layer 1 those of layer 1: .*must",
        ),
        (lambda: PodPlan(((0,), (0,), (1,)), 9, 64), r"layer 2, head 0 reads the keys of layer 1"),
        (
            lambda: PodPlan(((0,),), 2, 4, maps=np.zeros((1, 2, 4, 3))),
            r"maps must be .*here \[1, 2, 4, 4\], got \[1, 2, 4, 3\]",
        ),
        (lambda: PLAN.saving_at(0), r"length must be an int >= 1, got 0"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be(make, match):
    refused(match, make)


def test_plans_that_do_not_fit_a_model(shallow, small, story):
    refused(
        r"for a model with 2 layers, 9 heads, 3 KV heads of 64 dims, and the model has 3 layers, 4 "
        r"heads, 2 KV heads of 8 dims: explore",
        lambda: jaxkv.generate(small, [5, 6, 7], policy=SHARED),
    )
    refused(r"the model has 3 layers", lambda: PodPlan.for_config(PLAN.root, small.config))
    most = shallow.config.max_positions
    refused(
        rf"sinks=16 and recent={most} are {most + 16} near tokens, and .* has {most} positions",
        lambda: jaxkv.generate(shallow, story[:9], policy=PoD(PLAN, recent=most)),
    )
    assert PoD(PLAN, recent=most - 16).prepare(shallow).recent == most - 16


def test_files_that_are_no_plans(tmp_path):
    file = tmp_path / "plan.json"
    refused(r"there is no plan .*plan.json: make one with", lambda: PodPlan.load(file))
    dataclasses.replace(PLAN, maps=np.zeros((2, 9, 64, 64), np.float32)).save(file)
    content = json.loads(file.read_text())
    (tmp_path / "plan.safetensors").write_bytes(b"damaged")
    refused(r"plan.json cannot be read as a plan: ", lambda: PodPlan.load(file))
    (tmp_path / "plan.safetensors").unlink()
    refused(r"plan.json cannot be read as a plan: .*plan.safetensors", lambda: PodPlan.load(file))
    del content["maps"]
    for change, match in [
        ({"kind": "session"}, r"no plan of jaxkv.pod.explore"),
        ({"format": 99}, r"a newer jaxkv wrote it \(format 99\)"),
        ({"root": [[0, 0, 0], [0, 2, 0]]}, r"the root of layer 1, head 1 is layer 2"),
        ({"root": 5}, r"cannot be read as a plan"),
    ]:
        file.write_text(json.dumps({**content, **change}))
        refused(match, lambda: PodPlan.load(file))
    for field in ("format", "root", "num_heads", "head_dim"):
        file.write_text(json.dumps({k: v for k, v in content.items() if k != field}))
        refused(rf"cannot be read as a plan: it has no '{field}'", lambda: PodPlan.load(file))
    for damaged in ("{", "[1, 2]"):
        file.write_text(damaged)
        refused(r"plan.json cannot be read as a plan", lambda: PodPlan.load(file))
