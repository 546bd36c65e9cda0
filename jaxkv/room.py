"""Before a text is read: how many tokens each head keeps, how many slots that takes, and whether
the text fits the positions that a model was trained on.
"""

import dataclasses

import numpy as np
from jaxtyping import Int

from jaxkv.buckets import slot_bucket
from jaxkv.cache import UNBOUNDED, Cache
from jaxkv.models.params import Params
from jaxkv.policies.base import Policy, registered

#: Where positions depend on the cache, prompts are read in blocks of at most so many tokens.
_ROLLING_BLOCK = 512
#: A length of which any fraction is enough for any policy.
_LONG = 2**24


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run of a policy over some sequences needs."""

    #: The policy and the weights as the compiled loops get them.
    policy: Policy
    weights: Params = dataclasses.field(repr=False)
    #: Tokens per KV head.
    budgets: Int[np.ndarray, "layers batch kv_heads"]
    #: Slots of each layer.
    slots: tuple[int, ...]
    #: Tokens of a prompt that are read at once.
    block: int
    #: Tokens that a sequence will have seen in the end, and how many of them come one at a time.
    total: int
    grow: int

    def with_budgets(self, budgets: Int[np.ndarray, "layers batch kv_heads"]) -> "Plan":
        """The plan after a prompt has been judged: the same with other budgets."""
        slots = _slots(self.policy, budgets, self.total, self.grow)
        return dataclasses.replace(self, budgets=budgets, slots=slots)

    @property
    def rolling(self) -> bool:
        """Whether positions depend on what the cache holds."""
        return self.policy.positions != "original"


def plan(
    params: Params,
    policy: Policy,
    prompts: list[int],
    *,
    new: int,
    grow: int,
    seen: list[int] | None = None,
    chunk: int | None = None,
    before: Cache | None = None,
) -> Plan:
    """Plans for one sequence per prompt.

    Args:
      params: the model.
      policy: what is kept.
      prompts: tokens that fractional budgets are of.
      new: tokens that will be read, at most, over all sequences: prompts and what follows.
      grow: how many of them come one at a time.
      seen: tokens that each sequence has seen before.
      chunk: tokens of a prompt to read at once, if that was asked for.
      before: the cache that will be extended; its budgets stay.

    Raises:
      ValueError: the text does not fit the model, or the policy does not fit the model or the text.

    """
    config, policy = params.config, policy.prepare(params)
    layers, kv_heads = config.num_layers, config.num_kv_heads
    total = max(seen or [0]) + new
    block = block_size(params, policy, max(new - grow, 1), chunk)
    # Fractions are of the first prompt; later only which heads keep everything is of interest.
    lengths = prompts if before is None else [_LONG] * len(prompts)
    budgets = np.stack([policy.budgets(length, layers, kv_heads) for length in lengths], 1)
    budgets = budgets.astype(np.int64)
    unbounded = budgets >= UNBOUNDED
    if before is not None:
        old = np.stack([np.asarray(layer.budget) for layer in before.layers])
        budgets = np.where(unbounded, UNBOUNDED, old)
        if policy.afterwards:
            # What came after the prompt is never cut.
            stored = np.stack([np.asarray(layer.stored()) for layer in before.layers])
            budgets = np.maximum(budgets, stored)
            grow = new
    check_room(params, policy, total, int(np.where(unbounded, 0, budgets).max()), block)
    if policy.pooled:
        # A pool is divided by budgets, so they must be what can be reached.
        budgets = np.where(unbounded, total, budgets)
    slots = _slots(policy, budgets, total, grow)
    if policy.selects == "pages":
        policy = policy.with_budget(int(budgets.max()))
    return Plan(policy, policy.weights(params), budgets, slots, block, total, grow)


def _slots(
    policy: Policy, budgets: Int[np.ndarray, "layers batch kv_heads"], total: int, grow: int
) -> tuple[int, ...]:
    """Slots of each layer: for what can be stored, one more per KV head, and padding."""
    room = budgets
    if policy.drops == "prompt":
        room = budgets + grow
    elif policy.drops == "bursts":
        room = budgets + policy.burst
    elif policy.drops == "never":
        room = np.full_like(budgets, total)
    if policy.sharing is not None:
        # Heads that follow another layer have the slots of that layer.
        own = np.array(policy.sharing.root) == np.arange(len(budgets))[:, None]
        room = np.where(own[:, None], room, 0)
    if policy.pooled:
        counts = (np.minimum(room, max(total, 1)) + 1).sum(2).max(1)
        # Heads that cannot fill their budgets still own the slots.
        counts = np.maximum(counts, (budgets + 1).sum(2).max(1))
    else:
        counts = np.minimum(room, total).max((1, 2)) + 1
    pages = [policy.page_of(layer) or 1 for layer in range(len(budgets))]
    return tuple(
        -(-slot_bucket(int(count)) // page) * page
        for count, page in zip(counts, pages, strict=True)
    )


def block_size(params: Params, policy: Policy, longest: int, chunk: int | None = None) -> int:
    """How many tokens of a prompt are read at once.

    Under original positions the whole prompt, unless a `chunk` is asked for. Where positions
    depend on the cache, a size that depends on the model alone, so that a row of a batch is cut in
    the same places whatever its neighbours are.
    """
    if chunk is not None:
        whole = isinstance(chunk, int | np.integer) and not isinstance(chunk, bool)
        if not whole or chunk < 2:
            raise ValueError(f"prefill_chunk must be an int >= 2, got {chunk!r}")
        if policy.afterwards:
            raise ValueError(
                f"{policy.name} judges a prompt when all of it has been read, so prefill_chunk="
                f"{chunk} would save no memory: leave it out, or use another policy"
            )
        return int(chunk)
    if policy.positions == "original":
        return longest
    return max(16, min(_ROLLING_BLOCK, params.config.max_positions // 2) // 16 * 16)


def check_room(params: Params, policy: Policy, total: int, budget: int, block: int) -> None:
    """Raises `ValueError` unless `total` tokens fit.

    Args:
      params: the model.
      policy: under rolling positions any number of tokens fits, if `budget` and `block` do.
      total: tokens that the model will have seen in the end.
      budget: the largest number of tokens that a KV head may store.
      block: the largest number of tokens that are read at once.
    """
    config, name = params.config, params.name or "the model"
    moving = policy.positions != "original"
    if moving and config.rotary_embedding is None:
        raise ValueError(
            f"{policy!r} has {policy.positions} positions, which need rotary embeddings; {name} "
            "adds learned positions to the hidden state: use positions='original', or another "
            "policy"
        )
    if total <= config.max_positions:
        return
    if not moving:
        able = [n for n, known in registered().items() if known.positions != "original"]
        advice = (
            f", or use positions='rolling' or a policy that goes on by itself: {', '.join(able)}"
            if config.rotary_embedding
            else ""
        )
        raise ValueError(
            f"the text needs {total} positions, {name} has {config.max_positions}: shorten it or "
            f"ask for fewer new tokens{advice}"
        )
    if not policy.evicts:
        raise ValueError(
            f"{policy.name} drops nothing, and {total} tokens do not fit the "
            f"{config.max_positions} positions of {name}: use a policy that drops tokens"
        )
    needed = budget + max(block, policy.burst)
    if policy.drops == "prompt":
        needed = budget + block
    if policy.positions == "ceiling":
        needed = max(int(policy.limit(budget)), block)
    if needed > config.max_positions:
        raise ValueError(
            f"a budget of {budget} tokens and blocks of {block} do not fit the "
            f"{config.max_positions} positions of {name}: give a budget of at most "
            f"{config.max_positions - block}"
        )
