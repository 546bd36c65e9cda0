"""Wrappers that change what a token is worth: by its value's part in the output, by its chunk."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxkv.cache import keep_best
from jaxkv.policies.base import New, Policy, Tokens, protect, register
from jaxkv.policies.expected_attention import ExpectedAttention
from jaxkv.policies.order import in_text_order, part_of
from jaxkv.policies.snapkv import SnapKV
from jaxkv.policies.wrapper import Wrapper


@register
@dataclasses.dataclass(frozen=True)
class CriticalKV(Wrapper):
    """What a token would add to the output counts (Feng et al. 2025): a first share of the budget
    goes by the inner order; of the others a token's score is weighted by ||W_o v||_1, the size of
    its value after the output projection.

    Attributes:
      of: whose scores are weighted. They must not be weighted by values already.
      budget: tokens per KV head.
      first: share of the budget that goes by the inner order.
      epsilon: added to scores before weighting.

    """

    of: Policy = dataclasses.field(default_factory=lambda: ExpectedAttention(use_value_norm=False))
    first: float = 0.5
    epsilon: float = 1e-4

    name: ClassVar[str] = "criticalkv"
    keeps: ClassVar[str] = "what would change the output most"
    frees: ClassVar[str] = "as what it wraps"
    source: ClassVar[str] = "CriticalKV, arXiv 2502.03805"

    def __post_init__(self) -> None:
        if not 0 <= self.first <= 1:
            raise ValueError(f"first must be a share in [0, 1], got {self.first!r}")
        super().__post_init__()
        if self.of.needs_traits:
            raise ValueError(
                f"CriticalKV and {self.of!r} each need the one number that a token may carry"
            )

    @property
    def needs_traits(self) -> Literal[True]:  # type: ignore[override]
        return True

    def trait(self, new: New) -> Float[Array, "batch kv_heads t"]:
        if new.output is None:
            raise ValueError("CriticalKV needs the model's output projection")
        _, kv_heads, group, _, dim = new.queries.shape
        heads = jnp.moveaxis(new.output.reshape(-1, kv_heads, group, dim), 0, 2)

        def norms(head: Array) -> Array:
            # One query head of each KV head at a time: all at once would be large.
            added = jnp.einsum("ked,bkdt->bket", head, new.values)
            return jnp.sum(jnp.abs(added).astype(jnp.float32), 2)

        return jnp.mean(lax.map(norms, jnp.moveaxis(heads, 1, 0)), 0)

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        assert tokens.traits is not None
        inner = self.of.priority(tokens)
        order = protect(tokens.age == 0, inner)
        safe = keep_best(order, tokens.positions, part_of(tokens.budget[..., 0], self.first))
        weighted = (inner + self.epsilon) * tokens.traits
        return protect(safe | jnp.isposinf(inner), weighted)


@register
@dataclasses.dataclass(frozen=True)
class ChunkKV(Wrapper):
    """Runs of tokens stay or go together (Liu et al. 2025): a token is worth the mean of its chunk.

    Each KV head has its own chunks; the last one that fits in part is cut, so that the budget is
    met (the authors keep whole chunks, the same for all heads).

    Attributes:
      of: whose scores are averaged; a policy that drops when a prompt is read.
      budget: tokens per KV head.
      chunk: tokens of a chunk; chunk i holds positions i * chunk and following.

    """

    of: Policy = dataclasses.field(default_factory=SnapKV)
    chunk: int = 20

    name: ClassVar[str] = "chunkkv"
    keeps: ClassVar[str] = "whole runs of tokens"
    frees: ClassVar[str] = "as what it wraps"
    source: ClassVar[str] = "ChunkKV, arXiv 2502.00299"

    def __post_init__(self) -> None:
        if type(self.chunk) is not int or self.chunk < 1:
            raise ValueError(f"chunk must be an int >= 1, got {self.chunk!r}")
        super().__post_init__()
        if self.of.drops != "prompt":
            raise ValueError(
                f"ChunkKV chooses runs when a prompt is read, and {self.of!r} drops "
                f"{self.of.drops!r}: wrap a policy that drops at the prompt, such as SnapKV"
            )

    def priority(self, tokens: Tokens) -> Float[Array, "batch kv_heads candidates"]:
        inner = self.of.priority(tokens)
        counted = (tokens.positions >= 0) & ~jnp.isposinf(inner)
        big = jnp.iinfo(jnp.int32).max
        order = jnp.argsort(jnp.where(tokens.positions < 0, big, tokens.positions), -1)
        chunk = jnp.take_along_axis(tokens.positions // self.chunk, order, -1)

        def runs(x: Array) -> Array:
            """Sums over runs of equal chunks, x in the order of the text."""
            new = jnp.concatenate(
                [jnp.zeros_like(chunk[..., :1]), chunk[..., 1:] != chunk[..., :-1]], -1
            )
            run = jnp.cumsum(new, -1)
            flat = run + jnp.arange(run[..., 0].size).reshape(*run.shape[:2], 1) * run.shape[-1]
            sums = jnp.zeros(run.size, jnp.float32).at[flat].add(x)
            return sums[flat]

        sums = in_text_order(runs, jnp.where(counted, inner, 0.0), tokens.positions)
        count = in_text_order(runs, counted.astype(jnp.float32), tokens.positions)
        return protect(jnp.isposinf(inner), sums / jnp.maximum(count, 1.0))
