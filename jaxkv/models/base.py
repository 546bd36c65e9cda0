"""What every model family shares: the call, the loop over blocks, the way to the logits."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxkv.cache import Cache
from jaxkv.extend import NewTokens, new_tokens
from jaxkv.models.config import Config
from jaxkv.policies.base import Policy
from jaxkv.sharding import constrain
from jaxkv.shared import lend, settle


class CausalLM(nnx.Module):
    """A decoder-only language model over `extend`.

    A family subclasses this, names its `config_class`, and gives `embed`, `unembed` and blocks in
    `self.layers`, each of which is called as `block(x, layer_cache, new, policy, index)` and
    returns the new hidden state and the new layer cache. Parameter paths are those of the
    checkpoint without its prefix. `model(config, rngs=None)` has shapes in place of arrays.
    """

    config_class: ClassVar[type[Config]]
    #: What stands before parameter paths in Hugging Face checkpoints; the first that fits is used.
    prefixes: ClassVar[tuple[str, ...]] = ("model.", "")

    layers: nnx.List

    def embed(
        self, tokens: Int[Array, "batch t"], positions: Int[Array, "batch t"]
    ) -> Float[Array, "batch t embed"]:
        """Hidden state of new tokens; positions are clipped to 0 for padding."""
        raise NotImplementedError(f"{type(self).__name__} must define embed")

    def unembed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        """Hidden state after the last block to logits."""
        raise NotImplementedError(f"{type(self).__name__} must define unembed")

    def __call__(
        self,
        tokens: Int[Array, "batch t"],
        cache: Cache,
        policy: Policy,
        *,
        added: Int[Array, " batch"] | None = None,
        fresh: bool = False,
        logits: Literal["last", "all"] = "last",
    ) -> tuple[Array, Cache]:
        """Extends the cache by new tokens.

        Args:
          tokens: ids; padding stands at the end of a row.
          cache: what the sequences have seen so far.
          policy: decides which tokens the returned cache still holds.
          added: real tokens per row; all of them if None.
          fresh: the cache is empty, so that a block need not read its slots.
          logits: of the last real token of each row `[batch, vocab]`, or of all
            `[batch, t, vocab]`.

        Returns:
          Float32 logits, and the cache after the policy has chosen.

        """
        batch, t = tokens.shape
        if added is None:
            added = jnp.full((batch,), t, jnp.int32)
        rotary = self.config.rotary_embedding
        new = new_tokens(cache.length, added, t, fresh=fresh, rotary=rotary)
        x = self.embed(tokens, jnp.maximum(new.positions, 0))
        x = constrain(x, ("batch", None, None))
        x, layers = self.run_blocks(x, cache.layers, new, policy)
        if logits == "last":
            x = jnp.take_along_axis(x, jnp.maximum(added - 1, 0)[:, None, None], 1)[:, 0]
        return self.unembed(x).astype(jnp.float32), Cache(layers, new.length)

    def run_blocks(
        self,
        x: Float[Array, "batch t embed"],
        layers: Sequence[Any],
        new: NewTokens,
        policy: Policy,
        *,
        remat: bool = False,
    ) -> tuple[Float[Array, "batch t embed"], tuple[Any, ...]]:
        """Calls one block after the other.

        Args:
          x: hidden state.
          layers: for each block its cache, or what else attends for it (`jaxkv.pod.whole`).
          new: the tokens of `x`.
          policy: decides what caches keep.
          remat: in a gradient, compute each block again rather than remember what is inside.

        """
        done: list[Any] = []
        for index, (block, layer) in enumerate(zip(self.layers, layers, strict=True)):

            def call(x: Array, layer: Any, block: Any = block, index: int = index) -> Any:
                return _call_block(block, x, layer, new, policy, jnp.int32(index))

            x, layer = (jax.checkpoint(call) if remat else call)(x, lend(layer, done))
            done.append(layer)
        return x, settle(done)


def _call_block(block: nnx.Module, *args: Any) -> tuple[Array, Any]:
    """Calls a block through `jax.jit`, so that equal blocks are traced once, not once a layer."""
    graphdef, state = nnx.split(block)
    return _traced_once(graphdef, nnx.to_pure_dict(state), *args)


@functools.partial(jax.jit, static_argnames=("graphdef", "policy"))
def _traced_once(
    graphdef: nnx.GraphDef,
    state: Mapping[str, Any],
    x: Array,
    layer: Any,
    new: NewTokens,
    policy: Policy,
    index: Array,
) -> tuple[Array, Any]:
    return nnx.merge(graphdef, state)(x, layer, new, policy, index)


def structure(
    model: type[CausalLM], config: Config
) -> tuple[nnx.GraphDef, Mapping[str, Any], Mapping[str, Any]]:
    """A model without its arrays: the graph, and by path the shapes and the logical axes."""
    known: Any = model
    return _structure(known, config)


@functools.cache
def _structure(model: Any, config: Config) -> Any:
    graphdef, state = nnx.split(model(config, rngs=None))
    shapes = nnx.to_pure_dict(state)
    axes = nnx.to_pure_dict(
        jax.tree.map(
            lambda variable: variable.get_metadata("logical_axes"),
            state,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
    )
    return graphdef, shapes, axes


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts to one dict by dotted path: `layers.0.self_attn.q_proj.weight`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat.update(flatten(value, path + ".") if isinstance(value, Mapping) else {path: value})
    return flat


def map_with_path(
    function: Callable[[str, Any], Any], tree: Mapping[Any, Any], prefix: str = ""
) -> dict[Any, Any]:
    """Applies `function(path, leaf)` to nested dicts."""
    return {
        key: map_with_path(function, value, f"{prefix}{key}.")
        if isinstance(value, Mapping)
        else function(f"{prefix}{key}", value)
        for key, value in tree.items()
    }
