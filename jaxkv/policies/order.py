"""Tools for rules that look at neighbours, or at the latest queries; shares of a budget."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxkv.attention import visible
from jaxkv.policies.base import Tokens

_BIG = jnp.iinfo(jnp.int32).max


def part_of(budget: Int[Array, "*shape"], share: float) -> Int[Array, "*shape"]:
    """A share of a number of tokens, rounded down: 53 for 0.53 of 100, which is 52.999... in
    floating point.
    """
    return (budget * jnp.float32(share) * jnp.float32(1 + 2e-7)).astype(jnp.int32)


def in_text_order(
    function: Callable[[Array], Array],
    values: Float[Array, "*rows candidates"],
    positions: Int[Array, "*#rows candidates"],
) -> Float[Array, "*rows candidates"]:
    """Applies a function of neighbours to values put in the order of their positions."""
    positions = jnp.broadcast_to(positions, values.shape)
    order = jnp.argsort(jnp.where(positions < 0, _BIG, positions), -1)
    sorted_values = function(jnp.take_along_axis(values, order, -1))
    return jnp.take_along_axis(sorted_values, jnp.argsort(order, -1), -1)


def pooled(
    values: Float[Array, "*rows candidates"], kernel: int, how: str
) -> Float[Array, "*rows candidates"]:
    """Average ("avg") or maximum ("max") over `kernel` neighbours. Beyond the ends there are
    zeros, which the average counts, and nothing for the maximum.
    """
    half = kernel // 2
    edge = 0.0 if how == "avg" else -jnp.inf
    ends = [(0, 0)] * (values.ndim - 1) + [(half, half)]
    padded = jnp.pad(values, ends, constant_values=edge)
    count = values.shape[-1]
    near = [padded[..., i : i + count] for i in range(kernel)]
    if how == "avg":
        return sum(near[1:], near[0]) / kernel
    return jnp.max(jnp.stack(near), 0)


def last_rows(tokens: Tokens, count: int) -> Float[Array, "batch kv_heads group count candidates"]:
    """Attention of the last `count` new tokens to all candidates; rows that are not there (the
    block is shorter) are 0.
    """
    new = tokens.new
    t = new.positions.shape[1]
    added = jnp.sum(new.positions >= 0, 1)
    index = added[:, None] - count + jnp.arange(count)
    at = jnp.clip(index, 0, max(t - 1, 0))
    queries = jnp.take_along_axis(new.turned, at[:, None, None, :, None], 3)
    positions = jnp.where(index >= 0, jnp.take_along_axis(new.positions, at, 1), -1)
    return attention(tokens, queries, positions[:, None], tokens.positions)


def attention(
    tokens: Tokens,
    queries: Float[Array, "batch kv_heads group count dim"],
    query_positions: Int[Array, "batch #kv_heads count"],
    key_positions: Int[Array, "batch kv_heads candidates"],
    over_group: bool = False,
) -> Float[Array, "batch kv_heads #group count candidates"]:
    """Attention of some queries to candidates; -1 positions neither ask nor are seen.

    `over_group` takes the highest logit of the group before the softmax.
    """
    logits = jnp.einsum(
        "bkgtd,bksd->bkgts", queries, tokens.turned_keys, preferred_element_type=jnp.float32
    )
    if over_group:
        logits = jnp.max(logits, 2, keepdims=True)
    seen = visible(query_positions, key_positions, tokens.new.window)[:, :, None]
    logits = jnp.where(seen, logits * queries.shape[-1] ** -0.5, -jnp.inf)
    highest = jnp.max(logits, -1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(highest), highest, 0.0))
    return weights / jnp.maximum(jnp.sum(weights, -1, keepdims=True), 1e-30)
