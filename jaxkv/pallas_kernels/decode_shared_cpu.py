"""A decode step of heads that share keys, on CPU: what `decode_cpu` does, with the logits of near
tokens in the places of the root's, and without what is skipped. All groups of a layer are one call.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.pallas_kernels import native
from jaxkv.pallas_kernels.decode_cpu import parts_of
from jaxkv.pallas_kernels.decode_shared import Changed, Pieces
from jaxkv.pallas_kernels.dispatch import check_dtypes
from jaxkv.shared import Sharing

_SKIP = {None: 0, "exact": 1, "predicted": 2}


def check(
    queries: Array,
    far_queries: Array,
    key: Array,
    value: Array,
    position: Array,
    groups: tuple[Pieces, ...],
    *,
    heads: tuple[tuple[int, ...], ...],
    sharing: Sharing,
    window: int | None = None,
) -> None:
    """Raises `NotImplementedError` for what `run` cannot serve."""
    del key, value, position, heads, sharing, window
    for near_keys, values, keys, *_ in groups:
        check_dtypes(
            queries=queries, far_queries=far_queries, near_keys=near_keys, values=values, keys=keys
        )
    if queries.dtype != jnp.float32:
        raise NotImplementedError(f"arrays must be float32, got {queries.dtype}")
    native.check()


def run(
    queries: Array,
    far_queries: Array,
    key: Array,
    value: Array,
    position: Array,
    groups: tuple[Pieces, ...],
    *,
    heads: tuple[tuple[int, ...], ...],
    sharing: Sharing,
    window: int | None = None,
) -> tuple[Array, tuple[Changed, ...]]:
    """See `decode_groups`. Near keys and values are changed in place."""
    batch, _, group, dim = queries.shape
    form, tau = (None, 1.0) if sharing.skip is None else sharing.skip
    rows = batch * sum(map(len, heads))
    parts = [parts_of(rows, pieces.keys.shape[2]) for pieces in groups]

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    arguments: list[Array] = [queries, far_queries, key, value, position]
    results = [array(batch, sum(map(len, heads)), group, dim)]
    aliases: dict[int, int] = {}
    for pieces, part in zip(groups, parts, strict=True):
        near_keys, values, keys, *_, root_far = pieces
        kv_heads, slots = keys.shape[1:3]
        aliases |= {len(arguments) + i: len(results) + i for i in range(2)}
        arguments += pieces[:6]
        arguments.append(jnp.zeros(0, jnp.float32) if root_far is None else root_far)
        each = (batch, kv_heads, group)
        results += [
            array(*near_keys.shape),
            array(*values.shape),
            array(batch, kv_heads, 2, dtype=jnp.int32),
            # Scratch.
            array(*each, slots),
            array(*each, near_keys.shape[2]),
            array(*each, -(-slots // part), 2 + dim),
        ]
    out, *rest = native.call(
        "jaxkv_decode_shared",
        tuple(results),
        *arguments,
        input_output_aliases=aliases,
        heads=np.array([head for own in heads for head in own], np.int64),
        part=np.array(parts, np.int64),
        window=np.int64(window or 0),
        sinks=np.int64(sharing.sinks),
        recent=np.int64(sharing.recent),
        skip=np.int64(_SKIP[form]),
        tau=np.float32(tau),
    )
    each_group = (rest[i : i + 3] for i in range(0, len(rest), 6))
    changed = (
        Changed(near_keys, values, None if form is None else counts)
        for near_keys, values, counts in each_group
    )
    return out, tuple(changed)
