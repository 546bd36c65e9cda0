"""Perplexity under a policy: what a model thinks of a text that it reads with a small cache."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from jaxkv import loops
from jaxkv.buckets import pad_rows, slot_bucket
from jaxkv.cache import UNBOUNDED
from jaxkv.models.params import Params
from jaxkv.policies.base import Policy, get
from jaxkv.prompts import to_rows
from jaxkv.room import check_room

#: Tokens given to the compiled loop at a time.
_BLOCK = 256


def perplexity(
    params: Params,
    text: Any,
    *,
    policy: str | Policy = "full",
    budget: int | float | None = None,
) -> float:
    """Perplexity of a text, teacher-forced, one token at a time from an empty cache: what a policy
    would see while decoding. The first token is given, all others are predicted.

    Args:
      params: a model.
      text: a string or token ids, at least two tokens.
      policy, budget: as for `jaxkv.generate`; a fractional budget is of the length of the text.

    Raises:
      ValueError: the text is shorter than two tokens, or longer than the model's positions under
        a policy that keeps original positions.

    """
    chosen = get(policy, budget)
    rows, single = to_rows(params, text)
    if not single:
        raise ValueError(f"perplexity takes one text, got {len(rows)}")
    ids = rows[0]
    if len(ids) < 2:
        raise ValueError(f"perplexity needs a text of at least 2 tokens, got {len(ids)}")
    inputs, targets = ids[:-1], ids[1:]
    config = params.config
    budgets = np.full(config.num_layers, UNBOUNDED)
    if chosen.evicts:
        budgets = np.array(chosen.layer_budgets(chosen.resolve(len(ids)), config.num_layers))
    check_room(params, chosen, len(inputs), int(budgets.max()), block=1)
    slots = tuple(slot_bucket(min(int(budget), len(ids)) + 1) for budget in budgets)
    cache = loops.empty_cache(params, chosen, jnp.array(budgets)[:, None], slots)
    total = 0.0
    console = Console(stderr=True)
    blocks = track(
        range(0, len(inputs), _BLOCK),
        "perplexity",
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    for start in blocks:
        tokens, added = pad_rows([inputs[start : start + _BLOCK]], _BLOCK)
        wanted, _ = pad_rows([targets[start : start + _BLOCK]], _BLOCK)
        # Without eviction a block sees what its tokens would see one by one, in less time.
        cache, logprob = loops.score_tokens(
            params.weights(), cache, tokens, wanted, added, chosen, not chosen.evicts
        )
        total += float(logprob[0])
    return math.exp(-total / len(targets))
