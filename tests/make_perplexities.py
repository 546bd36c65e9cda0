"""Make ``tests/story_perplexity.json``: what eviction costs, computed with PyTorch.

The text ``tests/story.txt`` is fed to a Llama model token by token, from an empty cache, and the
perplexity of its tokens is taken under several eviction policies. The weights and the tokenizer
are those that transformers reads from a GGUF file (SmolLM2-135M-Instruct, Q4_1), dequantised to
float32; the forward pass and the cache are written out below, as plainly as possible, so that they
share no code with the package. To make the file again::

    pip install torch transformers accelerate gguf
    python tests/make_perplexities.py SmolLM2-135M-Instruct.Q4_1.gguf

The protocol:

* Perplexity is ``exp(mean(-log p))`` over tokens 1 to n - 1; token 0 is given, and no special
  token is added.
* In each step the new token is stored in every layer and attends to all stored tokens, itself
  included. Then the attention probabilities of the step are added to the scores of the stored
  tokens, summed over the query heads that share a KV head. Then, if more than ``budget`` tokens
  are stored, each KV head of each layer evicts one token of its own.
* Scores are sums over the steps, in float32. A token starts with the probability that it gives
  itself in its first step.
* ``full`` evicts nothing. ``window`` evicts the oldest token. ``streaming`` evicts the oldest but
  for the first 4. ``h2o`` evicts the lowest score, protecting the ``budget - budget // 2`` newest
  tokens; ``heavy`` does so protecting the new token only.
* Keys keep the position that their token has in the text. In ``streaming_rolling`` they do not:
  stored tokens take positions 0, 1, 2, ... by age, anew in every step, and the query takes the
  position of the new token, the last of them.

Before anything is written, the logits of ``full`` are compared with those of transformers.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, silu
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
POLICIES = ("full", "window", "streaming", "streaming_rolling", "h2o", "heavy")
SINKS = 4


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of ``x`` [..., head_dim] at ``positions`` [...], halves paired."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class LayerCache:
    """The stored tokens of one layer, by age, oldest first; each KV head has tokens of its own."""

    def __init__(self, kv_heads: int, head_dim: int):
        self.keys = torch.zeros(kv_heads, 0, head_dim)  # not rotated
        self.values = torch.zeros(kv_heads, 0, head_dim)
        self.positions = torch.zeros(kv_heads, 0, dtype=torch.long)
        self.scores = torch.zeros(kv_heads, 0)

    def append(self, key: Tensor, value: Tensor, position: int) -> None:
        """Store a token; ``key`` and ``value`` are [kv_heads, head_dim]."""
        heads = len(key)
        self.keys = torch.cat([self.keys, key[:, None]], dim=1)
        self.values = torch.cat([self.values, value[:, None]], dim=1)
        self.positions = torch.cat([self.positions, torch.full((heads, 1), position)], dim=1)
        self.scores = torch.cat([self.scores, torch.zeros(heads, 1)], dim=1)

    def choose(self, policy: str, budget: int) -> Tensor:
        """The index of the token to evict, for each KV head."""
        heads, stored = self.scores.shape
        if policy == "window":
            return torch.zeros(heads, dtype=torch.long)
        if policy in ("streaming", "streaming_rolling"):
            return torch.full((heads,), SINKS)
        protected = {"h2o": budget - budget // 2, "heavy": 1}[policy]
        return self.scores[:, : stored - protected].argmin(dim=1)

    def evict(self, policy: str, budget: int) -> None:
        heads, stored = self.scores.shape
        if policy == "full" or stored <= budget:
            return
        victims = self.choose(policy, budget)
        kept = torch.arange(stored).expand(heads, stored) != victims[:, None]
        self.keys = self.keys[kept].view(heads, stored - 1, -1)
        self.values = self.values[kept].view(heads, stored - 1, -1)
        self.positions = self.positions[kept].view(heads, stored - 1)
        self.scores = self.scores[kept].view(heads, stored - 1)


def attend(
    cache: LayerCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: int,
    rolling: bool,
    theta: float,
) -> Tensor:
    """Store a token and attend from it; ``query`` and the result are [heads, head_dim]."""
    heads, head_dim = query.shape
    cache.append(key, value, position)
    kv_heads, stored = cache.scores.shape
    positions = torch.arange(stored).expand(kv_heads, stored) if rolling else cache.positions
    # Query heads 0 to group - 1 share KV head 0, the next ones KV head 1, and so on.
    queries = query.view(kv_heads, heads // kv_heads, head_dim)
    queries = rotate(queries, positions[:, -1:].expand(queries.shape[:2]), theta)
    keys = rotate(cache.keys, positions, theta)
    probabilities = (queries @ keys.transpose(1, 2) / math.sqrt(head_dim)).softmax(dim=-1)
    cache.scores = cache.scores + probabilities.sum(dim=1)
    return (probabilities @ cache.values).view(heads, head_dim)


@torch.inference_mode()
def stream(model: torch.nn.Module, ids: list[int], policy: str, budget: int) -> Tensor:
    """The logits [n - 1, vocabulary] that predict tokens 1 to n - 1, one step at a time."""
    config = model.config
    dim, kv_heads = config.head_dim, config.num_key_value_heads
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
    rolling = policy == "streaming_rolling"
    caches = [LayerCache(kv_heads, dim) for _ in range(config.num_hidden_layers)]
    logits = []
    for position, token in enumerate(ids[:-1]):
        x = model.model.embed_tokens.weight[token]
        for layer, cache in zip(model.model.layers, caches, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            y = rms_norm(x, layer.input_layernorm.weight, eps)
            query = linear(y, attention.q_proj.weight).view(-1, dim)
            key = linear(y, attention.k_proj.weight).view(-1, dim)
            value = linear(y, attention.v_proj.weight).view(-1, dim)
            y = attend(cache, query, key, value, position, rolling, theta)
            cache.evict(policy, budget)
            x = x + linear(y.reshape(-1), attention.o_proj.weight)
            y = rms_norm(x, layer.post_attention_layernorm.weight, eps)
            y = silu(linear(y, mlp.gate_proj.weight)) * linear(y, mlp.up_proj.weight)
            x = x + linear(y, mlp.down_proj.weight)
        x = rms_norm(x, model.model.norm.weight, eps)
        logits.append(linear(x, model.lm_head.weight))
    return torch.stack(logits)


@torch.inference_mode()
def check_forward(model: torch.nn.Module, ids: list[int], logits: Tensor) -> None:
    """Raise unless ``logits``, those of ``full``, are what transformers computes in one pass."""
    expected = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    error = (logits - expected).abs().max().item()
    print(f"largest difference from the logits of transformers: {error:.1e}", flush=True)
    if not error < 1e-2:
        raise SystemExit("the forward pass is not that of transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("gguf", type=Path, help="the model, a GGUF file of a Llama architecture")
    parser.add_argument("--text", type=Path, default=HERE / "story.txt")
    parser.add_argument("--tokens", type=int, help="use this many tokens of the text only")
    parser.add_argument("--budget", type=int, default=100)
    parser.add_argument("--output", type=Path, default=HERE / "story_perplexity.json")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.budget <= SINKS:
        parser.error(f"the budget has to be larger than the number of sinks, {SINKS}")

    torch.set_num_threads(args.threads)
    source = {"pretrained_model_name_or_path": args.gguf.parent, "gguf_file": args.gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    text = args.text.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False).input_ids[: args.tokens]
    print(f"{len(ids)} tokens: {ids[:16]} ...", flush=True)

    perplexity = {}
    for policy in POLICIES:
        start = time.perf_counter()
        logits = stream(model, ids, policy, args.budget)
        if policy == "full":
            check_forward(model, ids, logits)
        value = cross_entropy(logits.double(), torch.tensor(ids[1:])).exp().item()
        perplexity[policy] = round(value, 4)
        print(f"{policy:18} {value:9.4f}  ({time.perf_counter() - start:.0f} s)", flush=True)

    result = {
        "what": (
            f"Teacher-forced perplexity of {args.text.name} under {args.gguf.stem} (dequantised), "
            f"one token at a time from an empty cache, with at most {args.budget} tokens kept per "
            f"KV head after each step (all of them in full)."
        ),
        "source": (
            f"PyTorch {torch.__version__.split('+')[0]}, "
            f"transformers {transformers.__version__}, float32, CPU"
        ),
        "tokens": len(ids),
        "first_ids": ids[:16],
        "budget": args.budget,
        "perplexity": perplexity,
    }
    text = json.dumps(result, indent=2)
    compact = json.dumps(result["first_ids"])
    text = text.replace(json.dumps(result["first_ids"], indent=2).replace("\n", "\n  "), compact)
    args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
