"""Llama 1, 2 and 3, and what follows its plan: SmolLM2, Mistral, Qwen2, Qwen3.

Differences are settings of one block: biases of the projections, norms of queries and keys,
sliding windows, rope scaling, tied embeddings.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxkv.cache import LayerCache
from jaxkv.extend import NewTokens
from jaxkv.follow import extend_layer
from jaxkv.models.base import CausalLM
from jaxkv.models.config import Config, eos_ids, require, require_choice
from jaxkv.models.layers import Embedding, Linear, RMSNorm, far_map, matmul
from jaxkv.policies.base import Policy
from jaxkv.positions import rotary_frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
    """Settings of one member of the family."""

    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    #: Per layer, how many tokens back a query sees; None is all.
    windows: tuple[int | None, ...] = ()

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        require_choice(hf, "hidden_act", "silu", ("silu",))
        kind = hf.get("model_type")
        heads, hidden = require(hf, "num_attention_heads"), require(hf, "hidden_size")
        num_layers = require(hf, "num_hidden_layers")
        head_dim = hf.get("head_dim") or hidden // heads
        # transformers 5 writes `rope_parameters`; before, there were two fields.
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or hf.get("rope_theta") or 10000.0
        bias = bool(hf.get("attention_bias", False))
        return cls(
            vocab_size=require(hf, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=require(hf, "intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            max_positions=require(hf, "max_position_embeddings"),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            eos_ids=eos_ids(hf),
            rotary_embedding=rotary_frequencies(head_dim, float(theta), rope),
            norm_eps=hf.get("rms_norm_eps") or 1e-6,
            qkv_bias=bias or kind == "qwen2",
            output_bias=bias and kind != "qwen2",
            mlp_bias=bool(hf.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            windows=_windows(hf, num_layers),
        )


def _windows(hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    window = hf.get("sliding_window")
    if hf.get("layer_types"):
        kinds = hf["layer_types"]
        if len(kinds) != num_layers:
            raise ValueError(f"layer_types names {len(kinds)} layers, the model has {num_layers}")
    elif str(hf.get("model_type")).startswith("qwen"):
        first = hf.get("max_window_layers", num_layers) if hf.get("use_sliding_window") else None
        full = num_layers if first is None else first
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(num_layers)]
    else:
        kinds = ["sliding_attention"] * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class Attention(nnx.Module):
    """Grouped-query attention over the cache."""

    def __init__(self, config: LlamaConfig, window: int | None, *, rngs: nnx.Rngs | None):
        hidden, dim = config.hidden_size, config.head_dim
        queries, keys = config.num_heads * dim, config.num_kv_heads * dim
        bias = config.qkv_bias
        self.q_proj = Linear(hidden, queries, ("heads", "embed"), bias, rngs=rngs)
        self.k_proj = Linear(hidden, keys, ("kv_heads", "embed"), bias, rngs=rngs)
        self.v_proj = Linear(hidden, keys, ("kv_heads", "embed"), bias, rngs=rngs)
        self.o_proj = Linear(queries, hidden, ("embed", "heads"), config.output_bias, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.norm_eps, "head_dim", rngs=rngs)
            self.k_norm = RMSNorm(dim, config.norm_eps, "head_dim", rngs=rngs)
        if config.far_maps:
            self.far_map = far_map(config, rngs=rngs)
        self.config, self.window = config, window

    def __call__(
        self, x: Array, layer: LayerCache, new: NewTokens, policy: Policy, index: Array
    ) -> tuple[Array, LayerCache]:
        config = self.config
        q = self.q_proj(x).reshape(*x.shape[:2], config.num_heads, config.head_dim)
        k = self.k_proj(x).reshape(*x.shape[:2], config.num_kv_heads, config.head_dim)
        v = self.v_proj(x).reshape(*x.shape[:2], config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out, layer = extend_layer(
            q,
            k,
            v,
            layer,
            new,
            policy,
            index=index,
            window=self.window,
            output=self.o_proj.weight[...],
            far_map=self.far_map[...] if config.far_maps else None,
        )
        return self.o_proj(out.reshape(*x.shape[:2], -1)), layer


class MLP(nnx.Module):
    """Gated feed-forward (SwiGLU)."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs | None):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, ("mlp", "embed"), bias, rngs=rngs)
        self.up_proj = Linear(hidden, inner, ("mlp", "embed"), bias, rngs=rngs)
        self.down_proj = Linear(inner, hidden, ("embed", "mlp"), bias, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """Attention and feed-forward, each after a norm and added to the hidden state."""

    def __init__(self, config: LlamaConfig, window: int | None, *, rngs: nnx.Rngs | None):
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, rngs=rngs)
        self.self_attn = Attention(config, window, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x: Array, layer: LayerCache, new: NewTokens, policy: Policy, index: Array
    ) -> tuple[Array, LayerCache]:
        attended, layer = self.self_attn(self.input_layernorm(x), layer, new, policy, index)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), layer


class Llama(CausalLM):
    """The language model; call it as `logits, cache = model(tokens, cache, policy)`."""

    config_class = LlamaConfig
    prefixes = ("model.", "")

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs | None):
        vocab = (config.vocab_size, config.hidden_size, ("vocab", "embed"))
        self.embed_tokens = Embedding(*vocab, rngs=rngs)
        self.layers = nnx.List([Block(config, window, rngs=rngs) for window in config.windows])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, rngs=rngs)
        if not config.tie_embeddings:
            self.lm_head = Embedding(*vocab, rngs=rngs)
        self.config = config

    def embed(
        self, tokens: Int[Array, "batch t"], positions: Int[Array, "batch t"]
    ) -> Float[Array, "batch t embed"]:
        del positions
        return self.embed_tokens(tokens)

    def unembed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        head = self.embed_tokens if self.config.tie_embeddings else self.lm_head
        return matmul(self.norm(x), head.weight[...])
