"""Whether a text fits the positions that a model was trained on."""

from jaxkv.models.params import Params
from jaxkv.policies.base import Policy, registered

#: Under rolling positions prompts are read in blocks of at most so many tokens.
_ROLLING_BLOCK = 512


def block_size(params: Params, policy: Policy, longest: int) -> int:
    """How many tokens of a prompt are read at once.

    Under original positions the whole prompt. Under rolling positions a size that depends on the
    model alone, so that a row of a batch is cut in the same places whatever its neighbours are.
    """
    if policy.positions != "rolling":
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
    rolling = policy.positions == "rolling"
    if rolling and not config.rotary:
        raise ValueError(
            f"{policy!r} has rolling positions, which need rotary embeddings; {name} adds learned "
            "positions to the hidden state: use positions='original', or another policy"
        )
    if total <= config.max_positions:
        return
    if not rolling:
        able = [n for n, known in registered().items() if known.positions == "rolling"]
        advice = f", or use a policy that can go on: {', '.join(able)}" if config.rotary else ""
        raise ValueError(
            f"the text needs {total} positions, {name} has {config.max_positions}: shorten it or "
            f"ask for fewer new tokens{advice}"
        )
    if budget + block > config.max_positions:
        raise ValueError(
            f"a budget of {budget} tokens and blocks of {block} do not fit the "
            f"{config.max_positions} positions of {name}: give a budget of at most "
            f"{config.max_positions - block}"
        )
