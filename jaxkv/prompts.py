"""What a user may give as a prompt -> rows of token ids."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxkv.models.params import Params
from jaxkv.tokenizer import Tokenizer

#: A text, a chat, token ids; or a list of these, which is a batch.
Prompt = str | Sequence[Any] | np.ndarray

_KINDS = "a string, chat messages, token ids, or a list of one of these"


def to_rows(params: Params, prompt: Any) -> tuple[list[list[int]], bool]:
    """Token ids of each prompt, and whether it was one prompt rather than a batch.

    Strings and chats are encoded with the model's tokenizer and chat template.

    Raises:
      ValueError: a prompt is empty or of no known kind, ids lie outside the vocabulary, or text
        is given to a model without a tokenizer.

    """
    single = isinstance(prompt, str | Mapping) or _is_ids(prompt) or _is_chat(prompt)
    prompts = [prompt] if single else list(prompt) if _is_list(prompt) else None
    if not prompts:
        raise ValueError(f"prompt must be {_KINDS}, got {prompt!r}")
    rows = []
    for number, one in enumerate(prompts):
        where = "the prompt" if single else f"prompt {number} of the batch"
        rows.append(_to_ids(params, one, where))
    return rows, single


def _to_ids(params: Params, prompt: Any, where: str) -> list[int]:
    if isinstance(prompt, str):
        ids = _tokenizer(params).encode(prompt)
    elif _is_chat(prompt):
        ids = _tokenizer(params).chat(prompt)
    elif _is_ids(prompt):
        ids = [operator.index(token) for token in prompt]
    elif _is_list(prompt) and not len(prompt):
        ids = []
    else:
        raise ValueError(f"{where} must be {_KINDS}, got {prompt!r}")
    if not ids:
        raise ValueError(f"{where} is empty: give at least one token")
    outside = [token for token in ids if not 0 <= token < params.config.vocab_size]
    if outside:
        raise ValueError(
            f"{where} holds token id {outside[0]}; the vocabulary has ids 0 to "
            f"{params.config.vocab_size - 1}"
        )
    return ids


def _tokenizer(params: Params) -> Tokenizer:
    if params.tokenizer is None:
        raise ValueError(f"{params.name or 'the model'} has no tokenizer: give token ids")
    return params.tokenizer


def _is_list(x: Any) -> bool:
    if isinstance(x, str | bytes):
        return False
    return isinstance(x, Sequence) or (hasattr(x, "__array__") and np.ndim(x) > 0)


def _is_ids(x: Any) -> bool:
    if hasattr(x, "__array__"):
        return np.ndim(x) == 1 and np.issubdtype(np.asarray(x).dtype, np.integer)
    return _is_list(x) and len(x) > 0 and all(_is_id(t) for t in x)


def _is_id(x: Any) -> bool:
    if hasattr(x, "__array__"):
        return np.ndim(x) == 0 and np.issubdtype(np.asarray(x).dtype, np.integer)
    return isinstance(x, int)


def _is_chat(x: Any) -> bool:
    return (
        isinstance(x, Sequence)
        and len(x) > 0
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in x)
    )
