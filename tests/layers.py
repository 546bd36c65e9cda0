"""One layer of random text through `jaxkv.extend.extend`: a ragged batch, in padded blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import empty_layer
from jaxkv.extend import extend, new_tokens
from jaxkv.positions import rotary_frequencies

BATCH, KV_HEADS, GROUP, DIM = 3, 2, 2, 8
HEADS = KV_HEADS * GROUP
ROTARY = rotary_frequencies(DIM, 10000.0, None)
#: The number of the layer.
INDEX = 2
#: Widths of blocks: a prompt's, and any other's. Of more than one token, so that they are no steps.
FIRST, SECOND = 12, 5
#: Slots for each KV head, where they are not a pool: more than any text has tokens.
SLOTS = 32
#: Stands in padding. Not NaN: padding is a real embedding in a model, and always finite.
PADDING = 1e6
#: Compiling takes most of the time here, and little of it with code that need not be fast.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
#: Weight of an output projection, `[embed, heads * dim]`.
OUTPUT = np.random.default_rng(99).normal(size=(6, HEADS * DIM)).astype(np.float32)


@functools.partial(
    jax.jit, static_argnames=("policy", "slots", "rotary"), compiler_options=FAST_COMPILE
)
def first(queries, keys, values, budgets, added, policy, slots, rotary=ROTARY, output=OUTPUT):
    """The first block, into an empty layer."""
    recent, heads, kv_heads, dim = policy.recent_queries, queries.shape[2], *keys.shape[2:]
    layer = empty_layer(
        budgets,
        slots,
        dim,
        keys.dtype,
        scores=policy.needs_scores,
        traits=policy.needs_traits,
        ranks=policy.positions == "rolling",
        weight=policy.weighs_layers,
        pooled=policy.pooled,
        page=policy.page_of(INDEX),
        queries=(heads // kv_heads, recent) if recent else None,
    )
    new = new_tokens(jnp.zeros_like(added), added, keys.shape[1], fresh=True, rotary=rotary)
    return _extend(queries, keys, values, layer, new, policy, output)


@functools.partial(jax.jit, static_argnames=("policy", "rotary"), compiler_options=FAST_COMPILE)
def more(queries, keys, values, layer, seen, added, policy, rotary=ROTARY, output=OUTPUT):
    """A later block or, if it is one token wide, a step."""
    new = new_tokens(seen, added, keys.shape[1], fresh=False, rotary=rotary)
    return _extend(queries, keys, values, layer, new, policy, output)


def _extend(queries, keys, values, layer, new, policy, output):
    return extend(
        queries,
        keys,
        values,
        layer,
        new,
        policy,
        index=jnp.int32(INDEX),
        output=jnp.asarray(output),
    )


def text(rng, n, spread=2.0):
    """Queries, keys and values of `n` tokens per row."""
    shapes = [(BATCH, n, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
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


def play(
    policy, arrays, budgets, slots, schedule, padding=PADDING, *, rotary=ROTARY, output=OUTPUT
):
    """Runs blocks, given as (width, added): yields the output and the layer after each.

    `budgets` are those of the rows, or of every KV head of every row.
    """
    budgets = np.asarray(budgets, np.int32)
    if budgets.ndim == 1:
        budgets = np.repeat(budgets[:, None], arrays[1].shape[2], 1)
    seen = np.zeros(len(budgets), np.int32)
    layer = None
    for width, added in schedule:
        added = np.array(added, np.int32)
        block = padded(arrays, seen, added, width, padding)
        if layer is None:
            out, layer = first(*block, budgets, added, policy, slots, rotary, output)
        else:
            out, layer = more(*block, layer, seen, added, policy, rotary, output)
        seen = seen + added
        yield np.asarray(out), layer


def by_head(layer):
    """Positions as each KV head sees them, [batch, kv_heads, slots]."""
    positions = np.asarray(layer.positions)
    if layer.starts is None:
        return positions
    starts = np.asarray(layer.starts)[..., None]
    ends = np.concatenate([starts[:, 1:], np.full_like(starts[:, :1], layer.slots)], 1)
    slot = np.arange(layer.slots)
    return np.where((slot >= starts) & (slot < ends), positions, -1)


def kept(layer, row):
    """Positions stored, sorted, per KV head."""
    return [sorted(positions[positions >= 0].tolist()) for positions in by_head(layer)[row]]


def contents(layer, row):
    """What is stored of each token, by KV head and position."""
    arrays = {name: getattr(layer, name) for name in ("keys", "values", "scores", "traits")}
    arrays = {
        name: None if array is None else np.asarray(array)[row] for name, array in arrays.items()
    }
    arrays["values"] = np.swapaxes(arrays["values"], 1, 2)
    found = {}
    for kv_head, positions in enumerate(by_head(layer)[row]):
        at = kv_head if layer.starts is None else 0
        for slot in np.flatnonzero(positions >= 0):
            token = found[kv_head, int(positions[slot])] = {"slot": int(slot)}
            for name, array in arrays.items():
                token[name] = None if array is None else array[at, slot]
    return found
