"""Sizes are rounded up to a few, so that new lengths rarely compile new programs."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def pad_rows(rows: Sequence[Sequence[int]], width: int) -> tuple[jax.Array, jax.Array]:
    """Rows of token ids as one array, padded at the end, and their lengths."""
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return jnp.asarray(tokens), jnp.array([len(row) for row in rows], jnp.int32)


def prompt_bucket(length: int) -> int:
    """Prompts are padded to few sizes, so that new lengths rarely compile anew: powers of two and
    the sizes halfway between, from 16.
    """
    size = 16
    while size < length:
        if size * 3 // 2 >= length:
            return size * 3 // 2
        size *= 2
    return size


def slot_bucket(slots: int) -> int:
    """Slots are padded for the same reason, but by at most a sixteenth, since they are read at
    every step; multiples of 16 keep rows aligned.
    """
    step = max(16, 2 ** max(0, slots.bit_length() - 5))
    return -(-slots // step) * step
