"""OPT: learned positions, LayerNorm before or after each part, ReLU, biases everywhere."""

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

#: The table of positions starts with two rows that no token uses.
_POSITION_OFFSET = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(Config):
    """Settings of one OPT checkpoint."""

    #: Width of the embedding; differs from the hidden size in OPT-350M, which projects.
    embedding_size: int
    norm_first: bool
    final_norm: bool
    bias: bool
    activation: str

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        heads, hidden = require(hf, "num_attention_heads"), require(hf, "hidden_size")
        norm_first = bool(hf.get("do_layer_norm_before", True))
        return cls(
            vocab_size=require(hf, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=require(hf, "ffn_dim"),
            num_layers=require(hf, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            max_positions=require(hf, "max_position_embeddings"),
            tie_embeddings=bool(hf.get("tie_word_embeddings", True)),
            eos_ids=eos_ids(hf),
            embedding_size=hf.get("word_embed_proj_dim") or hidden,
            norm_first=norm_first,
            final_norm=norm_first and not hf.get("_remove_final_layer_norm", False),
            bias=bool(hf.get("enable_bias", True)),
            activation=require_choice(hf, "activation_function", "relu", tuple(ACTIVATIONS)),
        )


class Attention(nnx.Module):
    """Multi-head attention over the cache, with biases."""

    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs | None):
        size, bias = config.hidden_size, config.bias
        self.q_proj = Linear(size, size, ("heads", "embed"), bias, rngs=rngs)
        self.k_proj = Linear(size, size, ("kv_heads", "embed"), bias, rngs=rngs)
        self.v_proj = Linear(size, size, ("kv_heads", "embed"), bias, rngs=rngs)
        self.out_proj = Linear(size, size, ("embed", "heads"), bias, rngs=rngs)
        if config.far_maps:
            self.far_map = far_map(config, rngs=rngs)
        self.config = config

    def __call__(
        self, x: Array, layer: LayerCache, new: NewTokens, policy: Policy, index: Array
    ) -> tuple[Array, LayerCache]:
        heads = (*x.shape[:2], self.config.num_heads, self.config.head_dim)
        q, k, v = (p(x).reshape(heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        output = self.out_proj.weight[...]
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
        return self.out_proj(out.reshape(x.shape)), layer


class Block(nnx.Module):
    """Attention and feed-forward; the norm comes before each, or after (OPT-350M)."""

    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs | None):
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.bias
        self.self_attn = Attention(config, rngs=rngs)
        self.self_attn_layer_norm = LayerNorm(hidden, 1e-5, rngs=rngs)
        self.fc1 = Linear(hidden, inner, ("mlp", "embed"), bias, rngs=rngs)
        self.fc2 = Linear(inner, hidden, ("embed", "mlp"), bias, rngs=rngs)
        self.final_layer_norm = LayerNorm(hidden, 1e-5, rngs=rngs)
        self.config = config

    def __call__(
        self, x: Array, layer: LayerCache, new: NewTokens, policy: Policy, index: Array
    ) -> tuple[Array, LayerCache]:
        act = ACTIVATIONS[self.config.activation]
        if self.config.norm_first:
            attended, layer = self.self_attn(
                self.self_attn_layer_norm(x), layer, new, policy, index
            )
            x = x + attended
            return x + self.fc2(act(self.fc1(self.final_layer_norm(x)))), layer
        attended, layer = self.self_attn(x, layer, new, policy, index)
        x = self.self_attn_layer_norm(x + attended)
        return self.final_layer_norm(x + self.fc2(act(self.fc1(x)))), layer


class OPT(CausalLM):
    """The language model; call it as `logits, cache = model(tokens, cache, policy)`."""

    config_class = OPTConfig
    prefixes = ("model.decoder.", "decoder.", "")

    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs | None):
        hidden, width = config.hidden_size, config.embedding_size
        vocab = (config.vocab_size, width, ("vocab", "embed"))
        self.embed_tokens = Embedding(*vocab, rngs=rngs)
        self.embed_positions = Embedding(
            config.max_positions + _POSITION_OFFSET, hidden, ("positions", "embed"), rngs=rngs
        )
        if width != hidden:
            self.project_in = Linear(width, hidden, ("embed", "word_embed"), False, rngs=rngs)
            self.project_out = Linear(hidden, width, ("word_embed", "embed"), False, rngs=rngs)
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        if config.final_norm:
            self.final_layer_norm = LayerNorm(hidden, 1e-5, rngs=rngs)
        if not config.tie_embeddings:
            self.lm_head = Embedding(*vocab, rngs=rngs)
        self.config = config

    def embed(
        self, tokens: Int[Array, "batch t"], positions: Int[Array, "batch t"]
    ) -> Float[Array, "batch t embed"]:
        x = self.embed_tokens(tokens)
        if self.config.embedding_size != self.config.hidden_size:
            x = self.project_in(x)
        return x + self.embed_positions(positions + _POSITION_OFFSET)

    def unembed(self, x: Float[Array, "*rows embed"]) -> Float[Array, "*rows vocab"]:
        if self.config.final_norm:
            x = self.final_layer_norm(x)
        if self.config.embedding_size != self.config.hidden_size:
            x = self.project_out(x)
        head = self.embed_tokens if self.config.tie_embeddings else self.lm_head
        return matmul(x, head.weight[...])
