"""Attention of a block of new tokens, and what each key received of it.

The sums over rows of a matrix of probabilities are wanted, and the matrix is too large to be
stored. Plain JAX passes over blocks of rows and has whole rows at hand; kernels keep each row's
log-sum-exp from a first pass, and make the probabilities again in a second one, key by key.

The real tokens of a block come first and have consecutive positions (see `extend.new_tokens`);
kernels rely on it.
"""

from typing import Any

from jaxkv.attention import attend_block
from jaxkv.pallas_kernels.dispatch import Operation, check_dtypes


def _check(queries: Any, query_positions: Any, keys: Any, *rest: Any, **options: Any) -> None:
    del query_positions, rest, options
    check_dtypes(queries=queries, keys=keys)


_HEADS = ("batch", "kv_heads")
prompt = Operation(
    name="prompt",
    plain=attend_block,
    check=_check,
    axes=(
        (*_HEADS, None, None, None),
        ("batch", None),
        (*_HEADS, None, None),
        (*_HEADS, None, None),
        (*_HEADS, None),
    ),
    out_axes=((*_HEADS, None, None, None), (*_HEADS, None)),
    overrides={"mosaic": "prompt_tpu", "triton": "prompt_gpu", "native": "prompt_cpu"},
)
