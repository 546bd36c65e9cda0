"""GPT-NeoX (also Pythia): parallel residual, rotary on part of each head, fused projections."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxkv.cache import LayerCache
from jaxkv.extend import NewTokens
from jaxkv.follow import extend_layer
from jaxkv.models.base import CausalLM
from jaxkv.models.config import Config, eos_ids, require, require_choice
from jaxkv.models.layers import ACTIVATIONS, Embedding, LayerNorm, Linear, far_map, matmul
from jaxkv.policies.base import Policy
from jaxkv.positions import rotary_frequencies


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(Config):
    """Settings of one GPT-NeoX checkpoint."""

    norm_eps: float
    parallel_residual: bool
    attention_bias: bool
    activation: str

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        heads, hidden = require(hf, "num_attention_heads"), require(hf, "hidden_size")
        head_dim = hidden // heads
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or hf.get("rotary_emb_base") or 10000.0
        share = rope.get("partial_rotary_factor") or hf.get("rotary_pct") or 0.25
        return cls(
            vocab_size=require(hf, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=require(hf, "intermediate_size"),
            num_layers=require(hf, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            max_positions=require(hf, "max_position_embeddings"),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            eos_ids=eos_ids(hf),
            rotary_embedding=rotary_frequencies(int(head_dim * share), float(theta), rope),
            norm_eps=hf.get("layer_norm_eps", 1e-5),
            parallel_residual=bool(hf.get("use_parallel_residual", True)),
            attention_bias=bool(hf.get("attention_bias", True)),
            activation=require_choice(hf, "hidden_act", "gelu", tuple(ACTIVATIONS)),
        )


class Attention(nnx.Module):
    """Multi-head attention over the cache; one projection gives q, k and v of each head."""

    def __init__(self, config: GPTNeoXConfig, *, rngs: nnx.Rngs | None):
        size, bias = config.hidden_size, config.attention_bias
        self.query_key_value = Linear(size, 3 * size, ("heads", "embed"), bias, rngs=rngs)
        self.dense = Linear(size, size, ("embed", "heads"), bias, rngs=rngs)
        if config.far_maps:
            self.far_map = far_map(config, rngs=rngs)
        self.config = config

    def __call__(
        self, x: Array, layer: LayerCache, new: NewTokens, policy: Policy, index: Array
    ) -> tuple[Array, LayerCache]:
        config = self.config
        heads = (*x.shape[:2], config.num_heads, 3, config.head_dim)
        qkv = self.query_key_value(x).reshape(heads)
        q, k, v = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]
        output = self.dense.weight[...]
        out, layer = extend_layer(
            q,
            k,
            v,
            layer,
            new,
            policy,
            index=index,
            output=output,
            far_map=self.far_map[...] if self.config.far_maps else None,
        )
        return self.dense(out.reshape(x.shape)), layer


class MLP(nnx.Module):
    """Feed-forward with biases."""

    def __init__(self, config: GPTNeoXConfig, *, rngs: nnx.Rngs | None):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.dense_h_to_4h = Linear(hidden, inner, ("mlp", "embed"), True, rngs=rngs)
        self.dense_4h_to_h = Linear(inner, hidden, ("embed", "mlp"), True, rngs=rngs)
        self.config = config

    def __call__(self, x: Array) -> Array:
        return self.dense_4h_to_h(ACTIVATIONS[self.config.activation](self.dense_h_to_4h(x)))


class Block(nnx.Module):
    """Attention and feed-forward, both from the same input or one after the other."""

    def __init__(self, config: GPTNeoXConfig, *, rngs: nnx.Rngs | None):
        hidden = config.hidden_size
        self.input_layernorm = LayerNorm(hidden, config.norm_eps, rngs=rngs)
        self.post_attention_layernorm = LayerNorm(hidden, config.norm_eps, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.config = config

    def __call__(
        self, x: Array, layer: LayerCache, new: NewTokens, policy: Policy, index: Array
    ) -> tuple[Array, LayerCache]:
        attended, layer = self.attention(self.input_layernorm(x), layer, new, policy, index)
        if self.config.parallel_residual:
            return x + attended + self.mlp(self.post_attention_layernorm(x)), layer
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), layer


class GPTNeoX(CausalLM):
    """The language model; call it as `logits, cache = model(tokens, cache, policy)`."""

    config_class = GPTNeoXConfig
    prefixes = ("gpt_neox.", "")

    def __init__(self, config: GPTNeoXConfig, *, rngs: nnx.Rngs | None):
        vocab = (config.vocab_size, config.hidden_size, ("vocab", "embed"))
        self.embed_in = Embedding(*vocab, rngs=rngs)
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_layer_norm = LayerNorm(config.hidden_size, config.norm_eps, rngs=rngs)
        if not config.tie_embeddings:
            self.embed_out = Embedding(*vocab, rngs=rngs)
        self.config = config

    def embed(
        self, tokens: Int[Array, "batch t"], positions: Int[Array, "batch t"]
    ) -> Float[Array, "batch t embed"]:
        del positions
        return self.embed_in(tokens)

    def unembed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        head = self.embed_in if self.config.tie_embeddings else self.embed_out
        return matmul(self.final_layer_norm(x), head.weight[...])
