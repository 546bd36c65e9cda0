"""The compiled loops, and their state. Programs are compiled here and nowhere else.

The prompt is read by `extend` in one block (or several, for prompts longer than the model's
positions), then tokens are decoded in a loop inside `jax.jit` with the cache donated: it is
updated in place.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cache import Cache, empty_layer
from jaxkv.models.base import structure
from jaxkv.models.params import Params
from jaxkv.policies.base import Policy
from jaxkv.sampling import Sampling, next_token

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
      budgets: tokens per KV head, int32 `[layers, batch]`.
      slots: slots per KV head of each layer; more than its largest budget that can be reached.

    """
    config = params.config
    batch = budgets.shape[1]
    layers = tuple(
        empty_layer(
            jnp.broadcast_to(budget[:, None], (batch, config.num_kv_heads)).astype(jnp.int32),
            count,
            config.head_dim,
            params.dtype,
            scores=policy.needs_scores,
            ranks=policy.positions == "rolling",
        )
        for budget, count in zip(budgets, slots, strict=True)
    )
    return Cache(layers, jnp.zeros((batch,), jnp.int32))


def _module(params: Params) -> Any:
    return nnx.merge(structure(params.model, params.config)[0], params.state)


@functools.partial(jax.jit, static_argnames=("policy", "slots"))
def read_first(
    params: Params,
    tokens: Int[Array, "batch t"],
    added: Int[Array, " batch"],
    budgets: Int[Array, "layers batch"],
    policy: Policy,
    slots: tuple[int, ...],
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Reads the first block of a prompt."""
    cache = empty_cache(params, policy, budgets, slots)
    return _module(params)(tokens, cache, policy, added=added, fresh=True)


@functools.partial(jax.jit, static_argnames=("policy",), donate_argnames=("cache", "logits"))
def read_more(
    params: Params,
    logits: Float[Array, "batch vocab"],
    cache: Cache,
    tokens: Int[Array, "batch t"],
    added: Int[Array, " batch"],
    policy: Policy,
) -> tuple[Float[Array, "batch vocab"], Cache]:
    """Reads a further block; rows without new tokens keep their logits."""
    new_logits, cache = _module(params)(tokens, cache, policy, added=added)
    return jnp.where(added[:, None] > 0, new_logits, logits), cache


@functools.partial(jax.jit, donate_argnames=("cache",))
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


@functools.partial(jax.jit, static_argnames=("policy",), donate_argnames=("loop",))
def decode(
    params: Params,
    loop: Loop,
    options: Sampling,
    eos: Int[Array, " ids"],
    steps: Int[Array, ""],
    policy: Policy,
) -> tuple[Loop, Int[Array, "batch chunk"], Float[Array, "batch chunk"]]:
    """Decodes up to `steps` (<= `CHUNK`) tokens; rows that have ended give -1 and stay as is."""
    module = _module(params)
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


@functools.partial(jax.jit, static_argnames=("policy", "at_once"), donate_argnames=("cache",))
def score_tokens(
    params: Params,
    cache: Cache,
    tokens: Int[Array, "batch t"],
    targets: Int[Array, "batch t"],
    added: Int[Array, " batch"],
    policy: Policy,
    at_once: bool,
) -> tuple[Cache, Float[Array, " batch"]]:
    """Feeds given tokens and sums the log-probabilities of the tokens that follow them.

    The first `added` tokens of a row are real. `at_once` feeds them as one block, instead of one
    after the other as decoding would.

    """
    module = _module(params)

    def logprob(logits, target):
        chosen = jnp.take_along_axis(logits, target[..., None], -1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, -1)

    if at_once:
        logits, cache = module(tokens, cache, policy, added=added, logits="all")
        real = jnp.arange(tokens.shape[1]) < added[:, None]
        return cache, jnp.sum(jnp.where(real, logprob(logits, targets), 0.0), -1)

    def body(step, carry):
        cache, total = carry
        running = step < added
        token = lax.dynamic_slice_in_dim(tokens, step, 1, 1)
        logits, cache = module(token, cache, policy, added=running.astype(jnp.int32))
        target = lax.dynamic_index_in_dim(targets, step, 1, keepdims=False)
        return cache, total + jnp.where(running, logprob(logits, target), 0.0)

    total = jnp.zeros(tokens.shape[:1], jnp.float32)
    return lax.fori_loop(0, jnp.max(added), body, (cache, total))
