"""How many tokens each head needs: the profile by which `jaxkv.Best` shares out a budget."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxkv import loops
from jaxkv.cache import UNBOUNDED, LayerCache, empty_layer
from jaxkv.extend import extend, new_tokens
from jaxkv.models.params import Params
from jaxkv.policies.base import Policy, Tokens
from jaxkv.policies.best import Best, Profile
from jaxkv.policies.static import Full
from jaxkv.prompts import to_rows

#: No head gets less or more than this many times the average.
_LEAST, _MOST = 0.1, 5.0


def fit_profile(
    params: Params, texts: Sequence[Any], *, length: int = 1536, budget: int = 250
) -> Profile:
    """Measures the relative budgets of a model's KV heads.

    While the model runs on full attention, every layer also replays the text one token at a time
    with `budget` tokens per KV head under `Best`'s rule. The squared error of what a KV head adds
    to the hidden state, relative to that state, is averaged over tokens and texts; shares are in
    proportion to its square root.

    Args:
      params: a model.
      texts: strings or token ids, of at least `length` tokens each; what is beyond is not used. A
        handful of different kinds is better than many of one.
      length: tokens of each text.
      budget: tokens per KV head in the replay; well below `length`.

    Returns:
      A table of relative budgets, one row per layer, one number per KV head, with mean 1.

    Raises:
      ValueError: there is no text, or one is too short, or `budget` is not below `length`.

    """
    if not 1 <= budget < length:
        raise ValueError(f"budget must be at least 1 and below length={length}, got {budget}")
    if isinstance(texts, str) or not len(texts):
        raise ValueError(f"texts must be a list of at least one text, got {texts!r}")
    rows, _ = to_rows(params, list(texts))
    short = [len(row) for row in rows if len(row) < length]
    if short:
        raise ValueError(f"every text needs {length} tokens, one has {short[0]}: give length=...")
    errors = sum(
        np.asarray(_errors(params.weights(), jnp.array([row[:length]]), budget)) for row in rows
    )
    shares = np.sqrt(errors / len(rows))
    for _ in range(20):  # clipping moves the mean
        shares = np.clip(shares / shares.mean(), _LEAST, _MOST)
    shares = shares / shares.mean()
    return tuple(tuple(round(float(share), 3) for share in row) for row in shares)


@functools.partial(jax.jit, static_argnames=("budget",))
def _errors(params: Params, tokens: Array, budget: int) -> Float[Array, "layers kv_heads"]:
    """Relative squared errors of one text."""
    config, count = params.config, tokens.shape[1]
    policy = _Replay(replay=budget)
    budgets = jnp.full((config.num_layers, 1), UNBOUNDED)
    cache = loops.empty_cache(params, policy, budgets, [count + 1] * config.num_layers)
    module = loops.module_of(params)
    new = new_tokens(
        cache.length, jnp.array([count]), count, fresh=True, rotary=config.rotary_embedding
    )
    x = module.embed(tokens, new.positions)
    errors = []
    for index, (block, layer) in enumerate(zip(module.layers, cache.layers, strict=True)):
        x, layer = block(x, layer, new, policy, jnp.int32(index))
        # The median: a few first tokens have hidden states of enormous norm.
        size = jnp.median(jnp.sum(jnp.square(x.astype(jnp.float32)), -1))
        errors.append(layer.weight[0] / size)
    return jnp.stack(errors)


@dataclasses.dataclass(frozen=True)
class _Replay(Policy):
    """Keeps every token, and notes for each head what replaying the block with few would change."""

    budget: int | float = 1.0
    replay: int = 250

    drops: ClassVar[Literal["never"]] = "never"
    weighs_layers: ClassVar[bool] = True

    def weigh(self, tokens: Tokens) -> Float[Array, "batch kv_heads"]:
        new, rule = tokens.new, Best(self.replay)
        if new.output is None:
            raise ValueError("a profile needs the model's output projection")
        batch, kv_heads, group, count, dim = new.queries.shape
        queries = jnp.moveaxis(new.queries, 3, 1).reshape(batch, count, kv_heads * group, dim)
        keys, values = jnp.moveaxis(new.keys, 2, 1), jnp.moveaxis(new.values, 3, 1)
        options: dict[str, Any] = {
            "window": new.window,
            "index": new.layer,
        }
        none, one = jnp.zeros(batch, jnp.int32), jnp.ones(batch, jnp.int32)

        def empty(policy: Policy, slots: int) -> LayerCache:
            room = jnp.full((batch, kv_heads), slots - 1, jnp.int32)
            return empty_layer(room, slots, dim, keys.dtype, scores=policy.needs_scores)

        everything = new_tokens(none, one * count, count, fresh=True, rotary=new.rotary)
        layer = empty(Full(), count + 1)
        whole, _ = extend(queries, keys, values, layer, everything, Full(), **options)

        def step(layer: LayerCache, i: Array) -> tuple[LayerCache, Array]:
            q, k, v = (lax.dynamic_slice_in_dim(x, i, 1, 1) for x in (queries, keys, values))
            came = new_tokens(none + i, one, 1, fresh=False, rotary=new.rotary)
            out, layer = extend(q, k, v, layer, came, rule, **options)
            return layer, out[:, 0]

        _, few = lax.scan(step, empty(rule, self.replay + 1), jnp.arange(count))
        apart = jnp.moveaxis(few, 0, 1) - whole
        apart = apart.reshape(batch, count, kv_heads, group, dim).astype(jnp.float32)
        output = new.output.astype(jnp.float32).reshape(-1, kv_heads, group, dim)
        added = jnp.einsum("btkgd,ekgd->btke", apart, output)
        return jnp.mean(jnp.sum(jnp.square(added), -1), 1)
