"""The cache of a layer: slots never move, budgets hold, and decoding updates it in place.

What must hold after every operation is checked on histories of blocks and steps, the rest on
small examples.

Mutations tried by hand, and the tests that failed:

- merge: the block's youngest first; or placed one slot further: fills_vacant_slots, keeps_its_slot
- merge: keys not stored: slot_holds_the_key; ranks not renewed: ranks_are_the_order_of_age
- merge: one token taken for two slots: no_token_is_stored_twice
- free_next: slots beyond the budget usable: no_more_than_the_budget, free_slot_is_empty
- free_next: the oldest of equals goes: slot_freed; ranks left alone: ranks_are_the_order_of_age
- keep_best: the youngest of equals stays: best_of_a_block
- write: the score of the evicted token stays: written_token_starts_anew
- extend: the newest token not protected: evicted_tokens_never_come_back
- resize: new slots at position 0: resizing_keeps_everything
- LAYER_AXES: axes of values swapped; nbytes: length left out: axes_named, nbytes
- decode: without donation: decoding_updates_the_cache_in_place
"""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxkv import cache as slots
from jaxkv import loops
from jaxkv.cache import LAYER_AXES, Cache, LayerCache, empty_layer
from jaxkv.extend import extend, new_tokens
from jaxkv.pallas_kernels.decode import put
from jaxkv.policies import H2O, Random
from jaxkv.sampling import row_keys, sampling

KV_HEADS, DIM, SLOTS = 2, 4, 9
BUDGETS = np.array([3, 8, 1], np.int32)
#: Width of a block, and how many of its tokens are real in each row.
SCHEDULE = [(6, (6, 2, 0)), (6, (1, 4, 3))]
SCHEDULE += [(1, (1, 1, 1)), (1, (1, 0, 1)), (1, (0, 1, 0)), (1, (1, 1, 1))]
SCHEDULE += [(6, (4, 0, 2)), (1, (1, 1, 1)), (1, (1, 1, 0)), (1, (1, 1, 1))]

#: Compiling takes most of the time here, and little of it with code that need not be fast.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


class RollingRandom(Random):
    """Evicts here and there, so that ranks are not simply slots or positions."""

    positions = "rolling"


@functools.partial(jit, static_argnames=("t", "policy"))
def run_block(key, layer, seen, added, t, policy):
    """Feeds tokens whose keys and values are full of their position."""
    new = new_tokens(seen, added, t, fresh=False)
    marked = jnp.broadcast_to(new.positions[..., None, None], (added.size, t, KV_HEADS, DIM))
    marked = marked.astype(jnp.float32)
    queries = jax.random.normal(key, (added.size, t, 2 * KV_HEADS, DIM))
    return extend(queries, marked, marked, layer, new, policy, index=jnp.int32(0))


def empty(policy):
    budget = jnp.broadcast_to(BUDGETS[:, None], (BUDGETS.size, KV_HEADS))
    rolling = policy.positions == "rolling"
    return empty_layer(budget, SLOTS, DIM, jnp.float32, scores=policy.needs_scores, ranks=rolling)


@pytest.fixture(scope="module", params=[H2O(), RollingRandom()], ids=["h2o", "rolling"])
def history(request):
    """The layer after each block: [(number of tokens seen, layer)], the empty one first."""
    layer, seen = empty(request.param), np.zeros(BUDGETS.size, np.int32)
    layers = [(seen, layer)]
    for i, (t, added) in enumerate(SCHEDULE):
        added = np.array(added, np.int32)
        _, layer = run_block(jax.random.key(i), layer, seen, added, t, request.param)
        seen = seen + added
        layers.append((seen, layer))
    return layers


def on_host(layer):
    """The arrays of a layer by name, as NumPy arrays."""
    named = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
    return types.SimpleNamespace(**jax.device_get(named))


def by_head(history):
    """Per row and KV head: the positions in its slots after each block, [block, slot]."""
    positions = np.stack([np.asarray(layer.positions) for _, layer in history])
    return [positions[:, row, head] for row in range(BUDGETS.size) for head in range(KV_HEADS)]


def test_a_stored_token_keeps_its_slot(history):
    stayed = 0
    for head in by_head(history):
        for before, after in itertools.pairwise(head):
            for position in set(before) & set(after) - {-1}:
                assert np.flatnonzero(before == position) == np.flatnonzero(after == position)
                stayed += 1
    assert stayed > 50


def test_a_slot_holds_the_key_and_value_of_its_token(history):
    for _, layer in history:
        layer = on_host(layer)
        full = layer.positions >= 0
        marks = np.repeat(layer.positions[full][:, None], DIM, 1)
        np.testing.assert_array_equal(layer.keys[full], marks)
        np.testing.assert_array_equal(np.swapaxes(layer.values, 2, 3)[full], marks)


def test_evicted_tokens_never_come_back(history):
    evicted = 0
    for head in by_head(history):
        gone = set()
        for before, after in itertools.pairwise(head):
            gone |= set(before) - set(after) - {-1}
            assert not gone & set(after)
        evicted += len(gone)
    assert evicted > 20


def test_no_more_than_the_budget_is_stored_and_no_less_than_there_is(history):
    evictions = 0
    for seen, layer in history:
        stored = np.sum(np.asarray(layer.positions) >= 0, -1)
        np.testing.assert_array_equal(layer.stored(), stored)
        want = np.minimum(seen, BUDGETS)[:, None]
        np.testing.assert_array_equal(stored, np.broadcast_to(want, stored.shape))
        evictions += np.sum(seen > BUDGETS)
    assert evictions


def test_no_token_is_stored_twice(history):
    for head in by_head(history):
        for positions in head:
            assert len(set(positions)) == 1 + np.sum(positions >= 0)


def test_the_free_slot_is_empty_and_within_the_budget(history):
    for _, layer in history:
        layer = on_host(layer)
        assert np.all(np.take_along_axis(layer.positions, layer.free[..., None], -1) == -1)
        assert np.all(layer.free <= layer.budget)
        # What lies beyond is padding, for ever.
        assert np.all(layer.positions[np.arange(SLOTS) > layer.budget[..., None]] == -1)


def test_ranks_are_the_order_of_age_after_every_operation(history):
    _, last = history[-1]
    if last.ranks is None:
        assert last.scores is not None  # H2O: each policy has what it needs and no more
        return
    assert last.scores is None
    for _, layer in history:
        layer = on_host(layer)
        older = layer.positions[..., None, :] < layer.positions[..., None]
        older &= layer.positions[..., None, :] >= 0
        full = layer.positions >= 0
        np.testing.assert_array_equal(layer.ranks[full], np.sum(older, -1)[full])
    in_slots = np.asarray(last.positions)[1, 0]
    assert np.any(np.diff(in_slots[in_slots >= 0]) < 0)  # age is not the order of slots


def stored(positions, budget=5):
    """One KV head that holds tokens; keys, values and scores are their positions."""
    at = jnp.array(positions, jnp.int32)[None, None]
    marks = at.astype(jnp.float32)
    return LayerCache(
        keys=jnp.repeat(marks[..., None], DIM, 3),
        values=jnp.repeat(marks[:, :, None], DIM, 2),
        positions=at,
        scores=marks,
        ranks=None,
        budget=jnp.full((1, 1), budget, jnp.int32),
        free=jnp.argmax(at < 0, -1).astype(jnp.int32),
    )


def test_a_block_fills_vacant_slots_in_order_of_age():
    layer = stored([7, -1, 3, 5, -1, -1])
    new = np.array([[[8, 9, 10, 11]]], np.int32)
    marks = new.astype(np.float32)
    merged = jit(slots.merge)(
        layer,
        slots.Candidates(
            np.repeat(marks[..., None], DIM, 3),
            np.repeat(marks[:, :, None], DIM, 2),
            new,
            marks,
            None,
        ),
        np.array([[[True, False, False, True, False, False]]]),
        np.array([[[True, False, True, True]]]),
    )
    want = [7, 8, 10, 5, 11, -1]
    assert merged.positions[0, 0].tolist() == want
    assert merged.keys[0, 0, :5, 0].tolist() == want[:5]
    assert merged.values[0, 0, -1, :5].tolist() == want[:5]
    assert merged.scores[0, 0, :5].tolist() == want[:5]
    assert merged.free.tolist() == [[5]]


def test_a_written_token_starts_anew_in_the_free_slot_alone():
    before = stored([4, -1, 6])
    mark, note = np.full((1, 1, DIM), 9, np.float32), jit(slots.note)
    keys, values = jit(put)(before.keys, before.values, mark, mark, before.free)
    assert keys[0, 0, :, 0].tolist() == [4, 9, 6]
    assert values[0, 0, 0].tolist() == [4, 9, 6]
    layer = note(before, np.array([9], np.int32))
    assert layer.positions[0, 0].tolist() == [4, 9, 6]
    assert layer.scores[0, 0].tolist() == [4, 0, 6]
    padding = note(before, np.array([-1], np.int32))
    assert padding.positions[0, 0].tolist() == [4, -1, 6]


@pytest.mark.parametrize(
    ("positions", "budget", "priority", "free", "left"),
    [
        ([4, 7, 5, 6], 3, [1, 2, 0, 3], 2, [4, 7, -1, 6]),  # the lowest goes
        ([4, 7, 6, 5], 3, [1, 1, 1, 1], 1, [4, -1, 6, 5]),  # of equals, the youngest
        ([4, 7, -1, 5], 3, [1, 2, 0, 3], 2, [4, 7, -1, 5]),  # none while there is room
        ([4, 7, -1, 5], 3, [1, 2, np.inf, 3], 2, [4, 7, -1, 5]),  # whatever an empty slot is worth
        ([4, 7, -1, -1], 1, [1, 2, 0, 0], 0, [-1, 7, -1, -1]),  # padding is not room
    ],
)
def test_the_slot_freed_is_the_one_worth_least(positions, budget, priority, free, left):
    worth = np.array(priority, np.float32)[None, None]
    layer = jit(slots.free_next)(stored(positions, budget), worth)
    assert layer.free.tolist() == [[free]]
    assert layer.positions[0, 0].tolist() == left


@pytest.mark.parametrize(
    ("positions", "budget", "priority", "kept"),
    [
        ([4, 7, 5, 6], 2, [1, 2, 0, 3], [7, 6]),
        ([7, 4, 6, 5], 2, [1, 1, 1, 1], [4, 5]),  # of equals, the oldest
        ([7, -1, 6, -1], 3, [-np.inf, 9, 0, np.inf], [7, 6]),  # never an empty slot
        ([7, 4, 6, 5], 1, [np.inf, 0, np.inf, 0], [6]),
    ],
)
def test_the_best_of_a_block_are_kept(positions, budget, priority, kept):
    at, worth = np.array(positions)[None, None], np.array(priority, np.float32)[None, None]
    keep = np.asarray(jit(slots.keep_best)(worth, at, np.full((1, 1), budget)))
    assert at[keep].tolist() == kept


def test_resizing_keeps_everything_and_never_shrinks(history):
    _, layer = history[-1]
    grown = slots.resize(layer, SLOTS + 3)
    assert grown.slots == SLOTS + 3
    assert slots.resize(layer, SLOTS - 3).slots == SLOTS
    for name, axes in LAYER_AXES.items():
        before, after = getattr(layer, name), getattr(grown, name)
        if before is None:
            assert after is None
            continue
        if "slots" in axes:
            after, more = np.split(np.asarray(after), [SLOTS], axes.index("slots"))
            assert np.all(more == (-1 if name == "positions" else 0))
        np.testing.assert_array_equal(after, before)
        assert after.dtype == before.dtype


def test_nbytes_is_the_sum_over_leaves(history):
    seen, layer = history[0]
    cache = Cache((layer, layer), jnp.asarray(seen))
    heads = BUDGETS.size * KV_HEADS
    # Keys, values, positions, and scores or ranks; budget and free; length.
    expected = 2 * heads * (4 * SLOTS * (2 * DIM + 2) + 4 * 2) + 4 * BUDGETS.size
    assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache)) == expected


def test_every_leaf_has_its_axes_named():
    assert list(LAYER_AXES) == [field.name for field in dataclasses.fields(LayerCache)]
    sizes = {"batch": 3, "kv_heads": 2, "slots": 8, "head_dim": 5, "group": 4, "recent": 6}
    sizes |= {"pages": 4, "bounds": 2}
    budget = jnp.ones((3, 2), jnp.int32)
    layer = empty_layer(
        budget,
        8,
        5,
        jnp.float32,
        scores=True,
        traits=True,
        ranks=True,
        weight=True,
        page=2,
        queries=(4, 6),
    )
    layer = dataclasses.replace(layer, starts=slots.segment_starts(budget, 8))
    for name, axes in LAYER_AXES.items():
        assert getattr(layer, name).shape == tuple(sizes[axis] for axis in axes), name


def test_decoding_updates_the_cache_in_place(small, monkeypatch):
    policy, layers = H2O(), small.config.num_layers
    budgets = jnp.full((layers, 2), 4000, jnp.int32)
    cache = loops.empty_cache(small, policy, budgets, [4096] * layers)
    token, done = jnp.zeros(2, jnp.int32), jnp.zeros(2, bool)
    loop = loops.Loop(cache, token, done, row_keys(0, 2), None)
    args = small, loop, sampling(), jnp.array([-1]), jnp.int32(8), policy
    # Lowering puts descriptions in the place of arrays.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    memory = loops.decode.program.lower(*args).compile().memory_analysis()
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert memory.alias_size_in_bytes >= held
    # Nor does the loop keep a copy of even one layer.
    assert memory.temp_size_in_bytes < held / layers
