"""The compiled loops, and their state. Programs are compiled here and nowhere else.

The prompt is read by `extend` in one block (or several, for prompts longer than the model's
positions), then tokens are decoded in a loop inside `jax.jit` with the cache donated: it is
updated in place.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv import pool
from jaxkv.cache import (
    LAYER_AXES,
    Cache,
    LayerCache,
    candidates,
    empty_layer,
    keep_best,
    merge,
    resize,
)
from jaxkv.extend import judge
from jaxkv.models.base import structure
from jaxkv.models.params import Params
from jaxkv.policies.base import Policy
from jaxkv.sampling import Sampling, next_token
from jaxkv.sharding import constrain_fields, on_mesh_of
from jaxkv.shared import (
    Part,
    SharedLayer,
    constrain_part,
    empty_follower,
    resize_shared,
)


def _compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`jax.jit`, for the mesh that the first argument lies on; `program` is the jitted function."""

    def wrap(function: Callable[..., Any]) -> Any:
        program = jax.jit(function, **options)

        @functools.wraps(function)
        def call(first: Any, *rest: Any, **named: Any) -> Any:
            with on_mesh_of(first):
                return program(first, *rest, **named)

        call.program = program  # type: ignore[attr-defined]
        return call

    return wrap


#: Tokens decoded per call of the compiled loop, at most.
CHUNK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loop:
    """State of generation between two tokens."""

    cache: Cache
    #: The last token of each row: chosen, not yet seen by the model.
    token: Int[Array, " batch"]
    #: Rows that have ended.
    done: Bool[Array, " batch"]
    #: One random key per row; a step folds in the number of tokens the row has seen.
    keys: Array
    #: Tokens that occurred; None unless there is a repetition penalty.
    used: Bool[Array, "batch vocab"] | None


def empty_cache(params: Params, policy: Policy, budgets: Array, slots: Sequence[int]) -> Cache:
    """A cache with nothing stored.

    Args:
      params: the model.
      policy: decides which statistics are kept.
      budgets: tokens per KV head, int32 `[layers, batch, kv_heads]` or `[layers, batch]`.
      slots: slots of each layer: more than its largest budget that can be reached, or in a pool
        than the largest sum of budgets, one for each head.

    """
    layers = tuple(
        _empty_shared_layer(params, policy, budget, slots, index)
        if policy.sharing
        else _empty_layer(params, policy, budget, count, index)
        for index, (budget, count) in enumerate(zip(budgets, slots, strict=True))
    )
    return Cache(layers, jnp.zeros((budgets.shape[1],), jnp.int32))


def _empty_shared_layer(
    params: Params, policy: Policy, budget: Array, slots: Sequence[int], index: int
) -> SharedLayer:
    assert policy.sharing is not None
    groups = policy.sharing.groups(index)
    if budget.ndim == 1:
        budget = jnp.broadcast_to(budget[:, None], (budget.shape[0], params.config.num_kv_heads))
    parts: list[Part] = []
    for group in groups:
        own, count = budget[:, jnp.array(group.heads)], slots[group.root]
        if group.root == index:
            parts.append(_empty_layer(params, policy.keeper, own, count, index))
            continue
        follower = empty_follower(
            policy.sharing,
            own.astype(jnp.int32),
            count,
            ring_places(policy, count),
            params.config.head_dim,
            params.dtype,
        )
        parts.append(constrain_part(follower))
    return SharedLayer(tuple(parts), groups)


def ring_places(policy: Policy, slots: int) -> int:
    """Places of a ring of near keys: no more than there are tokens, if none is dropped."""
    assert policy.sharing is not None
    return policy.sharing.near if policy.evicts else min(policy.sharing.near, slots)


def _empty_layer(
    params: Params, policy: Policy, budget: Array, slots: int, index: int
) -> LayerCache:
    config, recent = params.config, policy.recent_queries
    if budget.ndim == 1:
        budget = jnp.broadcast_to(budget[:, None], (budget.shape[0], config.num_kv_heads))
    layer = empty_layer(
        budget.astype(jnp.int32),
        slots,
        config.head_dim,
        params.dtype,
        scores=policy.needs_scores,
        traits=policy.needs_traits,
        ranks=policy.positions == "rolling",
        weight=policy.weighs_layers,
        pooled=policy.pooled,
        page=policy.page_of(index),
        queries=(config.num_heads // config.num_kv_heads, recent) if recent else None,
    )
    return constrain_fields(layer, LAYER_AXES)


def module_of(params: Params) -> Any:
    """The model as a module, inside a compiled program."""
    return nnx.merge(structure(params.model, params.config)[0], params.state)


@_compiled(static_argnames=("policy", "slots"))
def read_first(
    params: Params,
    tokens: Int[Array, "batch t"],
    added: Int[Array, " batch"],
    budgets: Int[Array, "layers batch kv_heads"],
    policy: Policy,
    slots: tuple[int, ...],
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Reads the first block of a prompt."""
    cache = empty_cache(params, policy, budgets, slots)
    return module_of(params)(tokens, cache, policy, added=added, fresh=True)


@_compiled(static_argnames=("policy",), donate_argnames=("cache", "logits"))
def read_more(
    params: Params,
    logits: Float[Array, "batch vocab"],
    cache: Cache,
    tokens: Int[Array, "batch t"],
    added: Int[Array, " batch"],
    policy: Policy,
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Reads a further block; rows without new tokens keep their logits."""
    new_logits, cache = module_of(params)(tokens, cache, policy, added=added)
    return jnp.where(added[:, None] > 0, new_logits, logits), cache


@_compiled(static_argnames=("policy",))
def watch(
    params: Params,
    cache: Cache,
    tokens: Int[Array, "batch t"],
    added: Int[Array, " batch"],
    policy: Policy,
) -> Cache:
    """Lets tokens look at the cache without entering it: only scores change.

    `policy` does not store (`Policy.stores`).
    """
    _, seen = module_of(params)(tokens, cache, policy, added=added)
    layers = tuple(
        dataclasses.replace(layer, scores=other.scores)
        for layer, other in zip(cache.layers, seen.layers, strict=True)
    )
    return Cache(layers, cache.length)


@_compiled(static_argnames=("policy", "slots"))
def compress(
    params: Params,
    cache: Cache,
    budgets: Int[Array, "layers batch kv_heads"],
    policy: Policy,
    slots: tuple[int, ...],
) -> Cache:
    """A smaller cache with the best tokens of a larger one; the larger one stays as it is."""

    def smaller(index: int, layer: LayerCache) -> LayerCache:
        rows = layer if layer.starts is None else pool.spread(layer)
        found = candidates(rows)
        budget = budgets[index].astype(jnp.int32)
        # The larger cache was read without a bound; orders may depend on the budget.
        rows = dataclasses.replace(rows, budget=budget)
        priority = judge(policy, rows, cache.length, jnp.int32(index))
        if policy.pooled:
            budget = policy.allot(priority, found.positions, budget)
        keep = keep_best(priority, found.positions, budget)
        rolling = policy.positions == "rolling"
        if policy.pooled:
            return pool.pack(found, keep, budget, slots[index], ranks=rolling)
        new = _empty_layer(params, policy, budget, slots[index], index)
        return merge(new, found, jnp.zeros(new.positions.shape, bool), keep)

    return Cache(tuple(smaller(i, layer) for i, layer in enumerate(cache.layers)), cache.length)


@_compiled(static_argnames=("slots", "policy"))
def enlarge(
    cache: Cache,
    budgets: Int[Array, "layers batch kv_heads"],
    slots: tuple[int, ...],
    policy: Policy,
) -> Cache:
    """A copy of the cache with at least `slots[i]` slots in layer i, and with these budgets."""

    def larger(layer: Any, budget: Array, wanted: int) -> Any:
        if isinstance(layer, SharedLayer):
            assert policy.sharing is not None
            ring = functools.partial(ring_places, policy)
            return resize_shared(layer, budget, slots, ring, policy.sharing)
        if layer.starts is None:
            return dataclasses.replace(resize(layer, wanted), budget=budget)
        rows = pool.spread(layer)
        keep = rows.positions >= 0
        wanted = max(wanted, layer.slots)
        return pool.pack(candidates(rows), keep, budget, wanted, ranks=layer.ranks is not None)

    # Copies, also of what does not change: arrays that come out as they went in would be the same
    # ones, and the loops that follow give theirs away.
    cache = jax.tree.map(jnp.copy, cache)
    layers = zip(cache.layers, budgets.astype(jnp.int32), slots, strict=True)
    return Cache(tuple(larger(*each) for each in layers), cache.length)


@_compiled(donate_argnames=("cache",))
def first_token(
    logits: Float[Array, "batch vocab"],
    cache: Cache,
    keys: Array,
    used: Bool[Array, "batch vocab"] | None,
    options: Sampling,
    eos: Int[Array, " ids"],
) -> tuple[Loop, Float[Array, " batch"]]:
    """Chooses the token after the prompt, and starts the loop."""
    running = jnp.ones(logits.shape[:1], bool)
    token, logprob, used = _choose(logits, cache, keys, used, options, running)
    return Loop(cache, token, jnp.isin(token, eos), keys, used), logprob


@_compiled(static_argnames=("policy",), donate_argnames=("loop",))
def decode(
    params: Params,
    loop: Loop,
    options: Sampling,
    eos: Int[Array, " ids"],
    steps: Int[Array, ""],
    policy: Policy,
) -> tuple[Loop, Int[Array, "batch chunk"], Float[Array, "batch chunk"]]:
    """Decodes up to `steps` (<= `CHUNK`) tokens; rows that have ended give -1 and stay as is."""
    module = module_of(params)
    batch = loop.token.shape[0]
    tokens = jnp.full((batch, CHUNK), -1, jnp.int32)
    logprobs = jnp.zeros((batch, CHUNK), jnp.float32)

    def more(carry):
        step, loop, _, _ = carry
        return (step < steps) & ~jnp.all(loop.done)

    def body(carry):
        step, loop, tokens, logprobs = carry
        running = ~loop.done
        logits, cache = module(
            loop.token[:, None], loop.cache, policy, added=running.astype(jnp.int32)
        )
        token, logprob, used = _choose(logits, cache, loop.keys, loop.used, options, running)
        tokens = tokens.at[:, step].set(jnp.where(running, token, -1))
        logprobs = logprobs.at[:, step].set(logprob)
        token = jnp.where(running, token, loop.token)
        done = loop.done | jnp.isin(token, eos)
        return step + 1, Loop(cache, token, done, loop.keys, used), tokens, logprobs

    _, loop, tokens, logprobs = lax.while_loop(more, body, (jnp.int32(0), loop, tokens, logprobs))
    return loop, tokens, logprobs


def _choose(logits, cache, keys, used, options, running):
    step_keys = jax.vmap(jax.random.fold_in)(keys, cache.length)
    token, logprob = next_token(logits, options, step_keys, used)
    if used is not None:
        used = used.at[jnp.arange(token.shape[0]), token].max(running)
    return token, logprob, used


@_compiled(static_argnames=("policy", "at_once"), donate_argnames=("cache",))
def score_tokens(
    params: Params,
    cache: Cache,
    tokens: Int[Array, "batch t"],
    targets: Int[Array, "batch t"],
    added: Int[Array, " batch"],
    policy: Policy,
    at_once: bool,
) -> tuple[Cache, Float[Array, " batch"], Int[Array, " batch"]]:
    """Feeds given tokens, sums the log-probabilities of the tokens that follow them, and counts how
    many of these were the most probable ones, which greedy decoding would have chosen.

    The first `added` tokens of a row are real. `at_once` feeds them as one block, instead of one
    after the other as decoding would.

    """
    module = module_of(params)

    def logprob(logits, target):
        chosen = jnp.take_along_axis(logits, target[..., None], -1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, -1)

    def hit(logits, target):
        return (jnp.argmax(logits, -1) == target).astype(jnp.int32)

    if at_once:
        fresh = policy.simulates
        logits, cache = module(tokens, cache, policy, added=added, fresh=fresh, logits="all")
        real = jnp.arange(tokens.shape[1]) < added[:, None]
        total = jnp.sum(jnp.where(real, logprob(logits, targets), 0.0), -1)
        return cache, total, jnp.sum(jnp.where(real, hit(logits, targets), 0), -1)

    def body(step, carry):
        cache, total, hits = carry
        running = step < added
        token = lax.dynamic_slice_in_dim(tokens, step, 1, 1)
        logits, cache = module(token, cache, policy, added=running.astype(jnp.int32))
        target = lax.dynamic_index_in_dim(targets, step, 1, keepdims=False)
        total += jnp.where(running, logprob(logits, target), 0.0)
        return cache, total, hits + jnp.where(running, hit(logits, target), 0)

    start = (
        cache,
        jnp.zeros(tokens.shape[:1], jnp.float32),
        jnp.zeros(tokens.shape[:1], jnp.int32),
    )
    return lax.fori_loop(0, jnp.max(added), body, start)
