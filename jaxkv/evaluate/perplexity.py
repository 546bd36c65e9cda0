"""Perplexity under a policy: what a model thinks of a text that it reads with a small cache."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import loops
from jaxkv.buckets import pad_rows
from jaxkv.cache import Cache
from jaxkv.models.params import Params
from jaxkv.policies.base import Policy, get
from jaxkv.prefill import read
from jaxkv.progress import each
from jaxkv.prompts import to_rows
from jaxkv.room import Plan, plan

#: Tokens given to the compiled loop at a time.
_BLOCK = 256


def perplexity(
    params: Params,
    text: Any,
    *,
    policy: str | Policy = "full",
    budget: int | float | None = None,
    prompt: int = 0,
    block: int = 1,
) -> float:
    """Perplexity of a text, teacher-forced. The first token is given, all others are predicted.

    By default the text is fed one token at a time to an empty cache: what a policy would see while
    decoding. Policies that drop tokens only when a prompt is read then drop none; for them, give a
    `prompt`.

    Args:
      params: a model.
      text: a string or token ids, at least two tokens.
      policy, budget: as for `jaxkv.generate`; a fractional budget is of the prompt, if there is
        one, else of the whole text.
      prompt: so many tokens are read at once and the policy chooses among them, and only what
        follows is predicted.
      block: tokens fed at a time. With more than one, a block sees all of itself, and the policy
        drops tokens after each block: faster on long texts.

    Raises:
      ValueError: the text is shorter than two tokens, or than the prompt, or longer than the
        model's positions under a policy that keeps original positions.

    """
    rows, single = to_rows(params, text)
    if not single:
        raise ValueError(f"perplexity takes one text, got {len(rows)}")
    found = perplexities(params, rows, policy=policy, budgets=[budget], prompt=prompt, block=block)
    return found[0][0].perplexity


@dataclasses.dataclass(frozen=True)
class Scored:
    """What a model thinks of one text under one budget."""

    perplexity: float
    #: Share of the predicted tokens that greedy decoding would have chosen.
    accuracy: float
    #: Tokens stored in the end per KV head, mean over heads and layers.
    kept: float
    #: Bytes of the cache that this text needs alone.
    cache_bytes: int
    #: Of the far parts of steps (`jaxkv.PoD`), the share that was skipped; None where none may be.
    skipped: float | None = None


def perplexities(
    params: Params,
    texts: Sequence[Any],
    *,
    policy: str | Policy = "full",
    budgets: Sequence[int | float | None] = (None,),
    prompt: int = 0,
    block: int = 1,
) -> list[list[Scored]]:
    """Perplexities of several texts under several budgets, `[budget][text]`.

    All are rows of one batch, in which each row has its own budget: one compiled program, and the
    weights are read once per step for all. The arguments and errors are those of `perplexity`.
    """
    policies = [get(policy, budget) for budget in budgets]
    rows, _ = to_rows(params, list(texts))
    total = _check(policies, rows, prompt, block)
    chosen = policies[0]
    start = max(prompt - 1, 0)
    if chosen.simulates:
        block = total
    # Policies that judge a prompt never cut what comes after it.
    grow = (total - start) if block == 1 or chosen.afterwards else 0
    chunk = None if start else max(block, 2)
    planned, alone = _plan_all(params, policies, rows, prompt, grow, chunk)
    chosen, weights, rows = planned.policy, planned.weights, rows * len(policies)
    if start:
        _, cache = read(params, planned, [row[:start] for row in rows])
    else:
        cache = loops.empty_cache(weights, chosen, jnp.array(planned.budgets), planned.slots)
    # Without eviction a block sees what its tokens would see one by one, in less time; far parts of
    # layers that share keys are skipped at steps only, and layers are merged after each block.
    sharing = chosen.sharing
    skips = sharing is not None and sharing.skip is not None
    merges = sharing is not None and sharing.merge is not None
    at_once = block > 1 or not (chosen.evicts or chosen.selects != "all" or skips or merges)
    width = block if block > 1 else _BLOCK
    logprobs, hits = np.zeros(len(rows)), np.zeros(len(rows))
    for first in each(range(start, total, width), "perplexity"):
        end = first + width
        wanted, added = pad_rows([row[first + 1 : end + 1] for row in rows], width)
        tokens, _ = pad_rows([row[first : min(end, len(row) - 1)] for row in rows], width)
        cache, logprob, hit = loops.score_tokens(
            weights, cache, tokens, wanted, added, chosen, at_once
        )
        logprobs += np.asarray(logprob)
        hits += np.asarray(hit)
    stored = np.mean([np.asarray(layer.stored()).mean(1) for layer in cache.layers], 0)
    live = np.stack([np.asarray(layer.budget) for layer in cache.layers])
    skipped = _skipped(cache) if skips else [None] * len(rows)
    scored = []
    for i, row in enumerate(rows):
        count = len(row) - 1 - start
        own = alone[i].with_budgets(live[:, i : i + 1])
        scored.append(
            Scored(
                perplexity=math.exp(-logprobs[i] / count),
                accuracy=float(hits[i]) / count,
                kept=float(stored[i]),
                cache_bytes=cache_bytes(params, own),
                skipped=skipped[i],
            )
        )
    return [scored[i : i + len(texts)] for i in range(0, len(scored), len(texts))]


def _skipped(cache: Cache) -> list[float]:
    """Of each row's far parts, the share that was skipped."""
    total = np.zeros((cache.length.shape[0], 2))
    for layer in cache.layers:
        if (counts := layer.skipped()) is not None:
            total += np.asarray(counts).sum(1)
    return [skip / max(there, 1) for skip, there in total.tolist()]


def _check(policies: Sequence[Policy], rows: list[list[int]], prompt: int, block: int) -> int:
    """Raises `ValueError` for what cannot be scored; gives the tokens read of the longest row."""
    if not policies:
        raise ValueError("budgets must hold at least one, got none")
    chosen, least = policies[0], min(map(len, rows))
    if least < 2:
        raise ValueError(f"perplexity needs a text of at least 2 tokens, got {least}")
    if not 0 <= prompt < least:
        raise ValueError(f"prompt must be at least 0 and less than {least}, got {prompt}")
    if block < 1:
        raise ValueError(f"block must be an int >= 1, got {block!r}")
    total = max(map(len, rows)) - 1
    if chosen.simulates:
        if prompt or block > 1:
            raise ValueError(f"{chosen!r} scores a whole text at once: leave out prompt and block")
        if least <= total:
            raise ValueError(
                f"{chosen!r} scores whole texts without padding: give texts of the same number of "
                f"tokens, got {least} and {total + 1}"
            )
    if chosen.afterwards and not prompt:
        raise ValueError(f"{chosen.name} judges a prompt that has been read: give a prompt")
    return total


def _plan_all(
    params: Params,
    policies: Sequence[Policy],
    rows: list[list[int]],
    prompt: int,
    grow: int,
    chunk: int | None,
) -> tuple[Plan, list[Plan]]:
    """The plan of the batch of every row under every budget, and of each of its rows alone."""
    total, start = max(map(len, rows)) - 1, max(prompt - 1, 0)
    plans, alone = [], []
    for policy in policies:
        lengths = [prompt or len(row) for row in rows]
        plans.append(plan(params, policy, lengths, new=total, grow=grow, chunk=chunk))
        for row, length in zip(rows, lengths, strict=True):
            own = len(row) - 1
            shorter = min(grow, own - start)
            alone.append(plan(params, policy, [length], new=own, grow=shorter, chunk=chunk))
    return join_plans(plans), alone


def join_plans(plans: Sequence[Plan]) -> Plan:
    """The plan of one batch of the rows of several plans that differ in budgets and rows.

    Rows have budgets of their own in the cache; the policy is that of the largest, which is what
    sizes in compiled programs follow.
    """
    largest = max(plans, key=lambda one: int(one.budgets.max()))
    budgets = np.concatenate([one.budgets for one in plans], 1)
    slots = tuple(max(each) for each in zip(*(one.slots for one in plans), strict=True))
    return dataclasses.replace(largest, budgets=budgets, slots=slots)


def cache_bytes(params: Params, planned: Plan) -> int:
    """Bytes of the cache of a plan, without making it."""

    def make() -> list[jax.Array]:
        budgets = jnp.array(planned.budgets)
        return jax.tree.leaves(loops.empty_cache(params, planned.policy, budgets, planned.slots))

    shapes = jax.eval_shape(make)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in shapes)
