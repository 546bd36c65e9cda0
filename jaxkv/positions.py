"""Rotary positions: which angle a token's query and key are turned by.

Position modes, chosen by the policy:

- `original`: a token keeps the position it had in the text. Keys are cached rotated.
- `rolling`: a token is placed at its rank among the tokens still stored (StreamingLLM,
  arXiv 2309.17453). Keys are cached before rotation and rotated whenever they are read, so that
  positions never exceed the number of slots and a stream may go on for ever.
- `ceiling`: keys are cached before rotation as well; a token is seen at its true distance, but
  none further away than a policy's `limit` (LM-Infinite, arXiv 2308.16137).
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

#: Cosines and sines of angles, each `[*shape, pairs]` in float32.
Turns = tuple[Array, Array]

POSITION_MODES = ("original", "rolling", "ceiling")


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary embedding (RoPE, arXiv 2104.09864) in the half-split form of Llama and GPT-NeoX.

    Static and hashable. `frequencies` are radians per position, one per rotated pair; the first
    `2 * len(frequencies)` dims of a head are rotated, the rest pass through.
    """

    frequencies: tuple[float, ...]

    def __call__(
        self, x: Float[Array, "*shape dim"], positions: Int[Array, "*#shape"]
    ) -> Float[Array, "*shape dim"]:
        """Rotates `x` to `positions`; computed in float32, returned in the dtype of `x`."""
        return turn(x, self._turns(positions))

    def shared_turns(self, positions: Int[Array, "*shape"]) -> Turns:
        """Cosines and sines for `positions`, for `turn`: computed once, whoever uses them.

        XLA on CPU would fuse them into each use and compute them again for every head of every
        layer, which took a twelfth of a prompt's time. It does not look through a branch.
        """

        def in_a_branch(positions: Array) -> Turns:
            some = jnp.any(positions >= 0)
            none = jnp.zeros((*positions.shape, len(self.frequencies)), jnp.float32)
            return lax.cond(some, self._turns, lambda _: (none, none), positions)

        return lax.platform_dependent(positions, cpu=in_a_branch, default=self._turns)

    def at_ranks(
        self, x: Float[Array, "*shape dim"], ranks: Int[Array, "*#shape"], limit: int
    ) -> Float[Array, "*shape dim"]:
        """As calling, for ranks below the static `limit`: cosines are looked up in a table, since
        a decode step with rolling positions rotates every slot.
        """
        angles = jnp.arange(limit, dtype=jnp.float32)[:, None] * self._frequencies()
        ranks = jnp.clip(ranks, 0, limit - 1)
        return turn(x, (jnp.cos(angles)[ranks], jnp.sin(angles)[ranks]))

    def _turns(self, positions: Int[Array, "*shape"]) -> Turns:
        angles = positions[..., None].astype(jnp.float32) * self._frequencies()
        return jnp.cos(angles), jnp.sin(angles)

    def _frequencies(self) -> Float[Array, " pairs"]:
        return jnp.array(self.frequencies, jnp.float32)


def turn(x: Float[Array, "*shape dim"], turns: Turns) -> Float[Array, "*shape dim"]:
    """Rotates `x`; computed in float32, returned in the dtype of `x`."""
    cos, sin = turns
    half = cos.shape[-1]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], -1)


def with_base(rotary: Rotary, base: float) -> Rotary:
    """The same with another base ("theta"): higher ones turn more slowly, for longer texts.

    Raises:
      ValueError: `base` is not above 1, or the frequencies do not follow from a base alone.

    """
    if not base > 1:
        raise ValueError(f"a base of rotary embeddings must be a number above 1, got {base!r}")
    frequencies = rotary.frequencies
    pairs = len(frequencies)
    ratios = [b / a for a, b in itertools.pairwise(frequencies)]
    if frequencies[0] != 1 or any(not math.isclose(r, ratios[0], rel_tol=1e-6) for r in ratios):
        raise ValueError(
            "the model's rotary embedding is scaled (rope_scaling) and does not follow from a base "
            "alone, so that it cannot be given another one"
        )
    return Rotary(tuple(base ** (-i / pairs) for i in range(pairs)))


def rotary_frequencies(dim: int, theta: float, scaling: Mapping[str, Any] | None) -> Rotary:
    """The rotary embedding of `dim` dims with base `theta` and a checkpoint's `rope_scaling`.

    Supported scalings: `default`, `linear`, `llama3` (the formula published with Llama 3.1), and
    `factors` (one divisor per frequency, as GGUF files store the outcome of that formula).

    Raises:
      ValueError: another scaling type, or one with missing fields.

    """
    base = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    scaling = dict(scaling or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    try:
        if kind == "default":
            return Rotary(tuple(base))
        if kind == "linear":
            return Rotary(tuple(f / scaling["factor"] for f in base))
        if kind == "llama3":
            return Rotary(tuple(_llama3_frequency(f, scaling) for f in base))
        if kind == "factors":
            return Rotary(tuple(f / c for f, c in zip(base, scaling["factors"], strict=True)))
    except KeyError as missing:
        raise ValueError(f"rope scaling {kind!r} has no {missing}; it has: {scaling}") from None
    raise ValueError(f"rope scaling must be 'default', 'linear' or 'llama3', got {kind!r}")


def _llama3_frequency(frequency: float, scaling: Mapping[str, Any]) -> float:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    turns = scaling["original_max_position_embeddings"] / wavelength
    # 0 for wavelengths longer than the trained context (stretched), 1 for short ones (kept).
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return (1 - kept) * frequency / scaling["factor"] + kept * frequency
