"""Texts to explore, repair and adapt on: rows of token ids of one length."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.models.params import Params
from jaxkv.prompts import to_rows


def cut(
    params: Params, texts: Sequence[Any], length: int, *, at_least: int, why: str
) -> list[list[int]]:
    """Each text's first `length` tokens.

    Args:
      params: whose tokenizer is used.
      texts: strings or token ids.
      length: tokens of each text, at most.
      at_least: tokens that a text must have.
      why: what asks for them, for the error.

    Raises:
      ValueError: there is no text, or one is too short.

    """
    if isinstance(texts, str) or not len(texts):
        raise ValueError(f"texts must be a list of at least one text, got {texts!r:.80}")
    if type(length) is not int or length < at_least:
        raise ValueError(f"length must be an int >= {at_least}, got {length!r}")
    rows, _ = to_rows(params, list(texts))
    for index, row in enumerate(rows):
        if len(row) < at_least:
            raise ValueError(
                f"text {index} has {len(row)} tokens, and {why} needs at least {at_least}"
            )
    return [row[:length] for row in rows]


def check_length(length: int, least: int, most: int) -> None:
    """Raises `ValueError` unless texts of so many tokens can be used with a model of `most`
    positions.
    """
    if type(length) is not int or not least <= length <= most:
        raise ValueError(
            f"length must be an int from {least} to {most}, the model's positions, got {length!r}"
        )


def pieces(
    params: Params, texts: Sequence[Any], length: int, *, count: int | None = None
) -> list[list[int]]:
    """Pieces of exactly `length` tokens from longer texts: all of them, or `count` of them evenly
    spread.

    Raises:
      ValueError: there are not so many, or `length` is below 1.

    """
    if type(length) is not int or length < 1:
        raise ValueError(f"length must be an int >= 1, got {length!r}")
    if isinstance(texts, str) or not len(texts):
        raise ValueError(f"texts must be a list of at least one text, got {texts!r:.80}")
    rows, _ = to_rows(params, list(texts))
    found = [
        row[start : start + length]
        for row in rows
        for start in range(0, len(row) - length + 1, length)
    ]
    wanted = len(found) if count is None else count
    if not found or len(found) < wanted:
        longest = max(map(len, rows))
        raise ValueError(
            f"the texts give {len(found)} pieces of {length} tokens, and {max(wanted, 1)} are "
            f"asked for (the longest text has {longest} tokens): give more text, or shorter pieces"
        )
    if count is None:
        return found
    return [found[i] for i in np.linspace(0, len(found) - 1, count).round().astype(int)]


def returning(rows: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Rows that end with their own first `count` tokens, in place of their last ones.

    A model reads a passage the second time by looking far back, at the place where it stood: what
    sharing does to heads that copy shows on such texts, and hardly on others.

    Raises:
      ValueError: a row has fewer than `2 * count` tokens.

    """
    if type(count) is not int or count < 1:
        raise ValueError(f"count must be an int >= 1, got {count!r}")
    shortest = min(map(len, rows), default=0)
    if shortest < 2 * count:
        raise ValueError(
            f"rows must have at least {2 * count} tokens, that {count} may return, and one has "
            f"{shortest}"
        )
    return [[*row[:-count], *row[:count]] for row in rows]
