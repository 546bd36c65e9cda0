"""Reading prompts: in blocks, and for policies that judge a prompt as a whole, in two goes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkv import loops
from jaxkv.buckets import pad_rows, prompt_bucket
from jaxkv.cache import Cache
from jaxkv.models.params import Params
from jaxkv.policies.base import Policy
from jaxkv.room import Plan, plan


def read(
    params: Params,
    planned: Plan,
    rows: Sequence[Sequence[int]],
    before: Cache | None = None,
) -> tuple[jax.Array, Cache]:
    """Reads one row of token ids per sequence; rows may differ in length.

    Args:
      params: the model.
      planned: from `jaxkv.room.plan`, for these rows.
      rows: token ids, at least one per row.
      before: what the sequences have read so far; it stays usable.

    Returns:
      The logits after each row, `[batch, vocab]`, and the cache.

    """
    policy = planned.policy
    if policy.afterwards and before is None:
        return _read_then_judge(params, planned, rows)
    return _read(planned.weights, planned, rows, before)


def _read(
    weights: Params, planned: Plan, rows: Sequence[Sequence[int]], before: Cache | None
) -> tuple[jax.Array, Cache]:
    policy, longest = planned.policy, max(map(len, rows))
    # Padded to few sizes, unless where a block ends depends on the row.
    block = min(planned.block, prompt_bucket(longest))
    if not planned.rolling and planned.block >= longest:
        block = prompt_bucket(longest)
    budgets = jnp.array(planned.budgets, jnp.int32)
    cache = logits = None
    if before is not None:
        cache = loops.enlarge(before, budgets, planned.slots, policy)
        logits = jnp.zeros((len(rows), weights.config.vocab_size), jnp.float32)
    for start in range(0, longest, block):
        tokens, added = pad_rows([row[start : start + block] for row in rows], block)
        if cache is None:
            logits, cache = loops.read_first(weights, tokens, added, budgets, policy, planned.slots)
        else:
            logits, cache = loops.read_more(weights, logits, cache, tokens, added, policy)
    assert logits is not None
    assert cache is not None
    return logits, cache


def judged_cache(
    params: Params, policy: Policy, rows: Sequence[Sequence[int]], *, room: int = 0
) -> tuple[jax.Array, Cache]:
    """What a policy that cuts a prompt afterwards judges by: the logits after each row, and a cache
    with all of its tokens and their scores, not a pool. It has slots for at least `room` tokens,
    so that texts of several lengths can use one program.

    Raises:
      ValueError: a row and what looks at it do not fit the model's positions together.

    """
    lengths = [len(row) for row in rows]
    whole = plan(params, policy.reader(), lengths, new=max(room, *lengths), grow=0)
    weights = whole.weights
    asked = list(policy.questions(params, rows))
    for texts in asked:
        _check_questions(params, policy, rows, texts)
    logits, cache = _read(weights, whole, rows, None)
    for texts in asked:
        tokens, added = pad_rows(texts, prompt_bucket(max(map(len, texts))))
        cache = loops.watch(weights, cache, tokens, added, policy.watcher())
    return logits, cache


def _check_questions(
    params: Params,
    policy: Policy,
    rows: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> None:
    most = params.config.max_positions
    for row, text in zip(rows, texts, strict=True):
        if len(row) + len(text) > most:
            raise ValueError(
                f"{policy.name} has a prompt of {len(row)} tokens looked at by {len(text)} more, "
                f"and {params.name or 'the model'} has {most} positions: shorten the prompt, or "
                "let fewer tokens look at once (chunk of jaxkv.KVzip)"
            )


def _read_then_judge(
    params: Params, planned: Plan, rows: Sequence[Sequence[int]]
) -> tuple[jax.Array, Cache]:
    policy = planned.policy
    logits, cache = judged_cache(params, policy, rows)
    judged = planned.with_budgets(policy.share(cache, planned.budgets))
    budgets = jnp.array(judged.budgets)
    return logits, loops.compress(planned.weights, cache, budgets, policy, judged.slots)
