"""`extend`, the one operation on the cache of a layer, against the oracle and the known traps.

The oracle (`oracles.py`) runs every row of a ragged, padded batch alone. Blocks are drawn by
hypothesis, and whatever stands in padding is large, so that a look at it would show.

Mutations tried by hand, and the tests that failed beside those against the oracle:

- visible: empty slots and padding seen: padding_is_never_seen, plain_attention
- visible: the window one token longer: window_of_a_model, cut_into_rows_and_parts
- attend_block: queries of padding scored: row_without_new_tokens, cut_into_rows_and_parts
- attend_block: scores summed over the batch: other_rows_change_nothing, collects_every_row
- attend_block: a part misses its last key: cut_into_rows_and_parts, collects_every_row
- attend_slots: rows that have ended give scores: row_without_new_tokens
- step: the mask taken from the order of slots: order_of_slots
- step: a new token starts with 0: collects_every_row
- block: stored scores not added to; write: scores not reset: none but the oracle
- block: ranks counted from the slots: plain_attention
- scores in the dtype of keys: half_precision
- priority: inf left above the newest, -inf left at empty slots; newest not protected: no_worth
- free_next: the oldest of equals goes; keep_best: the youngest stays: no_worth
- advance: rows that have ended advance: row_without_new_tokens
- H2O: the odd token of a budget to heavy: none but the oracle
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv import attention
from jaxkv.cache import empty_layer
from jaxkv.extend import extend, new_tokens
from jaxkv.policies import H2O, Full, Heavy, Policy, Random, Streaming, Tokens, Window
from jaxkv.positions import rotary_frequencies
from jaxkv.statistics import ColumnSums

DIM = 8
ROTARY = rotary_frequencies(DIM, 10000.0, None)
INDEX = 2
#: Stands in padding. Not NaN: padding is a real embedding in a model, and always finite.
PADDING = 1e6


@dataclasses.dataclass(frozen=True)
class Equal(Policy):
    """A policy of one's own: all are worth the same, so the older ones stay."""

    worth: float = 0.0

    def priority(self, tokens: Tokens) -> jax.Array:
        return jnp.full(tokens.positions.shape, self.worth, jnp.float32)


NOTHING = dict.fromkeys(set(Tokens._fields) - {"positions", "layer"})


def everywhere(policy: Policy) -> np.ndarray:
    """The priority of a policy that looks at positions only: [kv_head, position]."""
    positions = jnp.broadcast_to(jnp.arange(64), (1, 2, 64))
    tokens = Tokens(positions=positions, layer=jnp.int32(INDEX), **NOTHING)
    return np.asarray(policy.priority(tokens))[0]


DRAWN = everywhere(Random(seed=5))

#: Policy, and the rule for a budget.
CASES = {
    "full": (Full(), lambda n: oracles.Rule("full", n)),
    "window": (Window(), lambda n: oracles.Rule("window", n)),
    "streaming": (
        Streaming(sinks=2, positions="original"),
        lambda n: oracles.Rule("streaming", n, sinks=2),
    ),
    "streaming_rolling": (
        Streaming(sinks=3),
        lambda n: oracles.Rule("streaming", n, sinks=3, positions="rolling"),
    ),
    "h2o": (H2O(), lambda n: oracles.Rule("h2o", n, recent=(n + 1) // 2)),
    "h2o_parts": (H2O(heavy=3, recent=4), lambda n: oracles.Rule("h2o", n, recent=4)),
    "h2o_heavy_of_budget": (
        H2O(8, heavy=3),
        lambda n: oracles.Rule("h2o", n, recent=max(n - 3, 0)),
    ),
    "h2o_no_recent": (H2O(8, recent=0), lambda n: oracles.Rule("h2o", n, recent=0)),
    "h2o_no_heavy": (H2O(8, heavy=0), lambda n: oracles.Rule("h2o", n, recent=n)),
    "heavy": (Heavy(), lambda n: oracles.Rule("heavy", n)),
    "random": (
        Random(seed=5),
        lambda n: oracles.Rule("random", n, priority=lambda p, head: DRAWN[head, p]),
    ),
    "equal": (Equal(), lambda n: oracles.Rule("random", n, priority=lambda p, head: 0.0)),
}
#: Batch, KV heads, query heads of each, slots: with slots to spare, and two without.
WIDE, GROUPED, SINGLE = (3, 2, 2, 32), (2, 1, 3, 9), (1, 2, 1, 9)
SHAPES = (
    [(case, WIDE) for case in CASES]
    + [(case, GROUPED) for case in ("h2o", "h2o_no_recent", "heavy")]
    + [(case, SINGLE) for case in ("random", "streaming_rolling", "window")]
)
#: Widths of blocks.
FIRST, SECOND = 12, 5
#: Compiling takes most of the time here, and little of it with code that need not be fast.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
#: A padded block, a second one, steps, a later turn; rows pause and end.
SCHEDULE = [
    (FIRST, (12, 5, 1)),
    (SECOND, (3, 5, 0)),
    (1, (1, 1, 1)),
    (1, (1, 0, 1)),
    (1, (1, 0, 1)),
    (SECOND, (0, 2, 5)),
    (1, (1, 1, 0)),
]


@functools.partial(jax.jit, static_argnames=("policy", "slots"), compiler_options=FAST_COMPILE)
def first(queries, keys, values, budget, added, policy, slots):
    layer = empty_layer(
        jnp.broadcast_to(budget[:, None], (budget.size, keys.shape[2])),
        slots,
        DIM,
        keys.dtype,
        scores=policy.needs_scores,
        ranks=policy.positions == "rolling",
    )
    new = new_tokens(jnp.zeros_like(added), added, keys.shape[1], fresh=True, rotary=ROTARY)
    return extend(queries, keys, values, layer, new, policy, index=jnp.int32(INDEX))


@functools.partial(jax.jit, static_argnames=("policy", "window"), compiler_options=FAST_COMPILE)
def more(queries, keys, values, layer, seen, added, policy, window=None):
    new = new_tokens(seen, added, keys.shape[1], fresh=False, rotary=ROTARY)
    return extend(
        queries,
        keys,
        values,
        layer,
        new,
        policy,
        index=jnp.int32(INDEX),
        window=window,
    )


def text(rng, batch, n, kv_heads, group, spread=2.0):
    """Queries, keys and values of `n` tokens per row."""
    shapes = [(batch, n, heads, DIM) for heads in (kv_heads * group, kv_heads, kv_heads)]
    return [(rng.normal(size=shape) * spread).astype(np.float32) for shape in shapes]


def padded(arrays, seen, added, width, padding=PADDING):
    """The next `added` tokens of every row, as one block."""
    blocks = []
    for array in arrays:
        block = np.full((array.shape[0], width, *array.shape[2:]), padding, np.float32)
        for row, (start, count) in enumerate(zip(seen, added, strict=True)):
            block[row, :count] = array[row, start : start + count]
        blocks.append(block)
    return blocks


def play(policy, arrays, budgets, slots, schedule, padding=PADDING):
    """Runs blocks, given as (width, added): yields the output and the layer after each."""
    seen = np.zeros(len(budgets), np.int32)
    layer = None
    for width, added in schedule:
        added = np.array(added, np.int32)
        block = padded(arrays, seen, added, width, padding)
        if layer is None:
            out, layer = first(*block, np.array(budgets, np.int32), added, policy, slots)
        else:
            out, layer = more(*block, layer, seen, added, policy)
        seen = seen + added
        yield np.asarray(out), layer


def kept(layer, row):
    """Positions stored, per KV head."""
    return [sorted(p[p >= 0].tolist()) for p in np.asarray(layer.positions)[row]]


def scores(layer, row):
    """Score by position, per KV head."""
    positions, sums = np.asarray(layer.positions)[row], np.asarray(layer.scores)[row]
    return [
        {int(p): float(s) for p, s in zip(*head, strict=True) if p >= 0}
        for head in zip(positions, sums, strict=True)
    ]


def check(policy, rule, arrays, budgets, slots, schedule):
    """Every row of the batch equals the oracle run alone."""
    traces = []
    for row, budget in enumerate(budgets):
        blocks = [added[row] for _, added in schedule if added[row]]
        n = sum(blocks)
        traces.append(oracles.run(rule(budget), *(a[row, :n] for a in arrays), blocks))
    seen, step = [0] * len(budgets), [-1] * len(budgets)
    history = play(policy, arrays, budgets, slots, schedule)
    for (_, added), (out, layer) in zip(schedule, history, strict=True):
        for row, trace in enumerate(traces):
            if not added[row] and step[row] < 0:
                assert kept(layer, row) == [[]] * layer.positions.shape[1]
                continue
            end = seen[row] + added[row]
            np.testing.assert_allclose(
                out[row, : added[row]], trace.outputs[seen[row] : end], rtol=0, atol=2e-5
            )
            seen[row], step[row] = end, step[row] + bool(added[row])
            assert kept(layer, row) == trace.kept[step[row]]
            if policy.needs_scores:
                for got, want in zip(scores(layer, row), trace.scores[step[row]], strict=True):
                    assert got == pytest.approx(want, rel=1e-5, abs=1e-12)


@st.composite
def schedules(draw, batch):
    """A prompt block, perhaps a second one, single steps, and perhaps a later turn; rows take
    part in any of them or not."""

    def block(width, least=0):
        return width, draw(st.tuples(*[st.integers(least, width)] * batch))

    schedule = [block(FIRST)]
    for turn in range(2):
        if draw(st.booleans()) or turn:
            schedule.append(block(SECOND))
        schedule += [block(1) for _ in range(draw(st.integers(0, 5 - 2 * turn)))]
    return schedule


@pytest.mark.parametrize(("case", "shape"), SHAPES, ids=str)
@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_rows_of_a_ragged_batch_equal_the_oracle_alone(case, shape, data):
    policy, rule = CASES[case]
    batch, kv_heads, group, slots = shape
    schedule = data.draw(schedules(batch))
    lengths = [sum(added[row] for _, added in schedule) for row in range(batch)]
    budgets = [
        data.draw(st.integers(1, 8) | st.sampled_from([min(max(1, n), slots - 1), slots - 1]))
        for n in lengths
    ]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    arrays = text(rng, batch, max(lengths), kv_heads, group)
    check(policy, rule, arrays, budgets, slots, schedule)


def wide(seed):
    batch, kv_heads, group, _ = WIDE
    return text(np.random.default_rng(seed), batch, 27, kv_heads, group)


def contents(layer):
    """The arrays of a layer, with what stands in empty slots blanked."""
    full = layer.positions >= 0
    by_slot = {"keys": full[..., None], "values": full[:, :, None], "scores": full, "ranks": full}
    arrays = {name: getattr(layer, name) for name in ("positions", "budget", "free", *by_slot)}
    return {
        name: np.asarray(array if name not in by_slot else jnp.where(by_slot[name], array, 0))
        for name, array in arrays.items()
        if array is not None
    }


def assert_same_row(got, want, row):
    for name, array in contents(want).items():
        np.testing.assert_array_equal(contents(got)[name][row], array[row], err_msg=name)


@pytest.mark.parametrize("case", ["full", "h2o", "random", "streaming_rolling"])
def test_padding_is_never_seen_scored_or_kept(case):
    policy, budgets = CASES[case][0], [4, 7, 5]
    zeros = play(policy, wide(1), budgets, WIDE[-1], SCHEDULE, padding=0.0)
    large = play(policy, wide(1), budgets, WIDE[-1], SCHEDULE, padding=PADDING)
    for (_, added), (out, layer), (out_large, layer_large) in zip(
        SCHEDULE, zeros, large, strict=True
    ):
        for row in range(WIDE[0]):
            real = slice(0, added[row])
            np.testing.assert_array_equal(out_large[row, real], out[row, real])
            assert_same_row(layer_large, layer, row)


@pytest.mark.parametrize("case", ["full", "h2o", "random", "streaming_rolling"])
def test_a_row_without_new_tokens_stays_as_it_was(case):
    history = play(CASES[case][0], wide(2), [4, 7, 5], WIDE[-1], SCHEDULE)
    before = None
    for (_, added), (_, layer) in zip(SCHEDULE, history, strict=True):
        for row in range(WIDE[0]):
            if before is not None and not added[row]:
                assert_same_row(layer, before, row)
        before = layer


@pytest.mark.parametrize("case", ["h2o", "streaming_rolling"])
def test_other_rows_change_nothing(case):
    mine, others = wide(3), wide(4)
    for array, other in zip(mine, others, strict=True):
        other[0] = array[0]
    apart = [(width, (added[0], added[2], added[1])) for width, added in SCHEDULE]
    policy, slots = CASES[case][0], WIDE[-1]
    history = play(policy, mine, [6, 7, 5], slots, SCHEDULE)
    for (out, layer), (out_apart, layer_apart) in zip(
        history, play(policy, others, [6, 1, 20], slots, apart), strict=True
    ):
        np.testing.assert_array_equal(out_apart[0], out[0])
        assert_same_row(layer_apart, layer, 0)


@pytest.mark.parametrize("case", CASES)
def test_a_budget_of_all_tokens_is_plain_attention(case):
    plain = play(Full(), wide(5), [31, 31, 31], WIDE[-1], SCHEDULE)
    budgets = [sum(added[row] for _, added in SCHEDULE) for row in range(WIDE[0])]
    history = play(CASES[case][0], wide(5), budgets, WIDE[-1], SCHEDULE)
    for (_, added), (out, layer), (out_plain, layer_plain) in zip(
        SCHEDULE, history, plain, strict=True
    ):
        for row in range(WIDE[0]):
            real = slice(0, added[row])
            np.testing.assert_allclose(out[row, real], out_plain[row, real], rtol=0, atol=2e-5)
            assert kept(layer, row) == kept(layer_plain, row)


def test_a_token_collects_every_row_from_its_own_on():
    queries, keys, values = wide(6)
    # Without a query all visible tokens get the same share.
    arrays = [np.zeros_like(queries), keys, values]
    schedule = [(FIRST, (12, 12, 1)), (1, (1, 1, 1))]
    (_, block), (_, step) = play(H2O(), arrays, [31, 4, 4], WIDE[-1], schedule)
    group = WIDE[2]
    column = [group * sum(1 / (row + 1) for row in range(j, 12)) for j in range(12)]
    for head in scores(block, 0):
        assert head == pytest.approx(dict(enumerate(column)), rel=1e-6)
    for row, visible in enumerate([13, 5, 2]):
        newest = (12, 12, 1)[row]
        for before, after in zip(scores(block, row), scores(step, row), strict=True):
            assert after[newest] == pytest.approx(group / visible, rel=1e-6)
            for position in after.keys() - {newest}:
                assert after[position] - before[position] == pytest.approx(
                    group / visible, rel=1e-5
                )


@pytest.mark.parametrize(
    ("case", "shape"), [("h2o", GROUPED), ("streaming_rolling", SINGLE)], ids=str
)
def test_the_order_of_slots_means_nothing(case, shape):
    policy = CASES[case][0]
    batch, kv_heads, group, slots = shape
    rng = np.random.default_rng(7)
    arrays = text(rng, batch, 27, kv_heads, group)
    seen = np.full(batch, 5, np.int32)  # some slots are still empty
    block = padded(arrays, 0 * seen, seen, FIRST)
    _, layer = first(*block, np.full(batch, slots - 1, np.int32), seen, policy, slots)
    order = rng.permutation(slots)
    shuffled = dataclasses.replace(
        layer,
        keys=layer.keys[:, :, order],
        values=layer.values[..., order],
        positions=layer.positions[..., order],
        scores=None if layer.scores is None else layer.scores[..., order],
        ranks=None if layer.ranks is None else layer.ranks[..., order],
        free=jnp.argsort(order).astype(jnp.int32)[layer.free],
    )
    for width in (1, 1, SECOND, 1, 1):
        added = np.full(batch, width, np.int32)
        block = padded(arrays, seen, added, width)
        out, layer = more(*block, layer, seen, added, policy)
        out_shuffled, shuffled = more(*block, shuffled, seen, added, policy)
        np.testing.assert_allclose(out_shuffled, out, rtol=0, atol=2e-5)
        for row in range(batch):
            assert kept(shuffled, row) == kept(layer, row)
        seen = seen + added


def test_scores_of_half_precision_do_not_stall():
    steps, dtype = 3000, jnp.bfloat16
    # The first token draws 0.9 of the attention of every step: beside it there are two others.
    query = jnp.zeros((1, 1, 1, DIM), dtype).at[..., 0].set(1)
    strength = jnp.asarray(math.log(18) * math.sqrt(DIM), dtype)
    layer = empty_layer(jnp.full((1, 1), 2), 3, DIM, dtype, scores=True, ranks=False)

    def step(i, layer):
        key = query * jnp.where(i == 0, strength, 0)
        new = new_tokens(jnp.full((1,), i), jnp.ones((1,), jnp.int32), 1, fresh=False)
        out, layer = extend(query, key, key, layer, new, Heavy(), index=jnp.int32(0))
        assert out.dtype == dtype
        return layer

    layer = jax.jit(lambda layer: jax.lax.fori_loop(0, steps, step, layer))(layer)
    assert layer.keys.dtype == layer.values.dtype == dtype
    assert layer.scores.dtype == jnp.float32
    weight = math.exp(float(strength) / math.sqrt(DIM))
    total = 1 + weight / (weight + 1) + (steps - 2) * weight / (weight + 2)
    assert total > 2600
    assert scores(layer, 0)[0][0] == pytest.approx(total, rel=1e-3)


@pytest.mark.parametrize("worth", [math.inf, -math.inf])
def test_no_worth_loses_the_newest_token_or_wastes_the_budget(worth):
    check(Equal(worth=worth), CASES["equal"][1], wide(8), [1, 4, 20], WIDE[-1], SCHEDULE)


def test_the_window_of_a_model_sees_what_a_window_policy_keeps():
    arrays, nobody = wide(9), (0, 0, 0)
    steps = 10
    # A step sees what is stored and itself.
    policy = play(
        Window(), arrays, [3, 3, 3], WIDE[-1], [(FIRST, nobody)] + [(1, (1, 1, 1))] * steps
    )
    want = np.concatenate([out for out, _ in policy][1:], 1)
    ((_, empty),) = play(Full(), arrays, [31, 31, 31], WIDE[-1], [(FIRST, nobody)])
    for width in (1, SECOND):
        layer, outs = empty, []
        added = np.full(WIDE[0], width, np.int32)
        for start in range(0, steps, width):
            seen = np.full(WIDE[0], start, np.int32)
            block = padded(arrays, seen, added, width)
            out, layer = more(*block, layer, seen, added, Full(), window=4)
            outs.append(out)
        np.testing.assert_allclose(np.concatenate(outs, 1), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("rows", [2, 8])
def test_a_block_cut_into_rows_and_parts_is_attended_whole(monkeypatch, rows, window):
    # Only long blocks are cut; here 16 tokens are: into 4 parts of 2 times 2 rows, or 2 times 8.
    monkeypatch.setattr(attention, "_BLOCK_ROWS", rows)
    rng = np.random.default_rng(10)
    stored = [4, -1, 0, 2, -1, 3, 1]
    t, before = 16, len(stored)
    shapes = (2, 1, 2, t, DIM), (2, 1, before + t, DIM), (2, 1, DIM, before + t)
    queries, keys, values = [(rng.normal(size=x) * 2).astype(np.float32) for x in shapes]
    new = np.arange(5, 5 + t)
    new = np.stack([new, np.where(new < 15, new, -1)])
    positions = np.concatenate([np.tile(stored, (2, 1)), new], 1)
    # A function of its own, so that nothing traced with other rows is used.
    options = {"window": window, "statistics": (ColumnSums(),), "layer": jnp.int32(0)}
    attend = jax.jit(lambda *args: attention.attend_block(*args, **options))
    out, (received,) = attend(queries, new, keys, values, positions[:, None])

    distance = new[:, :, None] - positions[:, None]
    seen = (positions[:, None] >= 0) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    logits = np.einsum("bgtd,bsd->bgts", queries[:, 0], keys[:, 0], dtype=np.float64)
    weights = np.where(seen[:, None], np.exp(logits / math.sqrt(DIM)), 0.0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)  # padding sees nothing
    np.testing.assert_allclose(received[:, 0], weights.sum((1, 2)), rtol=1e-5, atol=1e-9)
    want = np.einsum("bgts,bds->bgtd", weights, values[:, 0])
    for row in range(2):
        real = new[row] >= 0
        np.testing.assert_allclose(out[row, 0][:, real], want[row][:, real], rtol=0, atol=2e-5)
