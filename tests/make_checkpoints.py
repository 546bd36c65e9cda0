"""Make the tiny random checkpoints in ``tests/checkpoints``.

For each model variant this writes a folder in Hugging Face format with

* ``config.json`` and ``model.safetensors`` (float32; ``llama3`` is split into several files with an
  index, as large models are);
* ``expected.json``: 40 token ids, the logits that transformers computes for them, and the greedy
  continuation of the first 8 of them.

The tests load these folders and compare with ``expected.json``, so they need neither PyTorch nor
transformers. To make the folders again::

    pip install torch transformers
    python tests/make_checkpoints.py

All numbers come from fixed seeds: with the same versions of the packages, on the same machine, the
files come out byte for byte the same. Before a variant counts as made, the script checks that it is
a useful test case: that its logits depend on distant tokens, on positions and on the settings it is
there to cover, and that the greedy choices are not so close that rounding could change them.

transformers 5 writes ``rope_parameters`` and ``dtype`` into ``config.json``. Most published models
carry the older ``rope_theta``, ``rope_scaling`` and ``torch_dtype``, so the variants with
``old_config`` set are rewritten into that form.
"""

import argparse
import copy
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 64
SEQUENCE_LENGTH = 40
PROMPT_LENGTH = 8
NEW_TOKENS = 16
WEIGHT_STD = 0.25
BIAS_STD = 0.1
NORM_STD = 0.1

COMMON = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 3, "max_position_embeddings": 128}
LLAMA = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
OPT = {**COMMON, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4}
GPT_NEOX = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "rotary_pct": 0.25,
}


def rope(theta: float, rope_type: str = "default", **settings: Any) -> dict[str, Any]:
    """Rotary embedding settings in the form transformers 5 takes."""
    return {"rope_type": rope_type, "rope_theta": theta, **settings}


@dataclass(frozen=True)
class Variant:
    """One checkpoint to make.

    ``seed`` was picked by trial so that the greedy continuation is varied and clear at every step.
    ``ablations`` maps the name of a setting that the variant covers to the config changes that
    vary it or switch it off; each must change the logits.
    """

    name: str
    seed: int
    config: PreTrainedConfig
    ablations: dict[str, dict[str, Any]] = field(default_factory=dict)
    old_config: bool = False
    max_shard_size: str = "1GB"


VARIANTS = [
    Variant(
        "llama2",
        6,
        LlamaConfig(
            **LLAMA | {"num_key_value_heads": 4},
            rms_norm_eps=1e-5,
            rope_parameters=rope(10000.0),
        ),
        ablations={"rope_theta": {"rope_parameters": rope(500.0)}},
        old_config=True,
    ),
    # The four rotary frequencies fall into all three bands of the llama3 scaling: the first is
    # kept, the second lies in the smooth part between, and the last two are divided by the factor.
    Variant(
        "llama3",
        12,
        LlamaConfig(
            **LLAMA | {"max_position_embeddings": 2048},
            head_dim=8,
            rms_norm_eps=1e-5,
            rope_parameters=rope(
                500000.0,
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=256,
            ),
        ),
        ablations={
            "rope_theta": {"rope_parameters": rope(10000.0)},
            "rope scaling": {"rope_parameters": rope(500000.0)},
        },
        max_shard_size="50KB",
    ),
    Variant(
        "llama_linear",
        15,
        LlamaConfig(**LLAMA, rope_parameters=rope(10000.0, "linear", factor=2.0)),
        ablations={
            "rope_theta": {"rope_parameters": rope(500.0, "linear", factor=2.0)},
            "rope scaling": {"rope_parameters": rope(10000.0)},
        },
        old_config=True,
    ),
    Variant(
        "smollm",
        9,
        LlamaConfig(
            **LLAMA
            | {
                "hidden_size": 36,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
            },
            head_dim=12,
            rms_norm_eps=1e-5,
            rope_parameters=rope(10000.0),
        ),
        ablations={"rope_theta": {"rope_parameters": rope(500.0)}},
    ),
    Variant(
        "mistral",
        7,
        MistralConfig(
            **LLAMA,
            rms_norm_eps=1e-5,
            sliding_window=16,
            rope_parameters=rope(10000.0),
        ),
        ablations={
            "rope_theta": {"rope_parameters": rope(500.0)},
            "sliding window": {"sliding_window": None},
            "sliding window by one": {"sliding_window": 17},
        },
    ),
    Variant(
        "qwen2",
        22,
        Qwen2Config(
            **LLAMA | {"tie_word_embeddings": True},
            rope_parameters=rope(1000000.0),
        ),
        ablations={"rope_theta": {"rope_parameters": rope(10000.0)}},
    ),
    Variant(
        "qwen3",
        16,
        Qwen3Config(**LLAMA | {"hidden_size": 24}, head_dim=16, rope_parameters=rope(1000000.0)),
        ablations={"rope_theta": {"rope_parameters": rope(10000.0)}},
    ),
    Variant(
        "opt",
        12,
        OPTConfig(**OPT, do_layer_norm_before=True),
    ),
    Variant(
        "opt_350m",
        10,
        OPTConfig(**OPT, do_layer_norm_before=False, word_embed_proj_dim=16),
    ),
    Variant(
        "gpt_neox",
        20,
        GPTNeoXConfig(**GPT_NEOX, use_parallel_residual=True, rope_parameters=rope(10000.0)),
        ablations={
            "rope_theta": {"rope_parameters": rope(500.0, partial_rotary_factor=0.25)},
            "rotary_pct": {"rope_parameters": rope(10000.0, partial_rotary_factor=1.0)},
            "parallel residual": {"use_parallel_residual": False},
        },
    ),
    Variant(
        "gpt_neox_sequential",
        14,
        GPTNeoXConfig(**GPT_NEOX, use_parallel_residual=False, rope_parameters=rope(10000.0)),
        ablations={
            "rope_theta": {"rope_parameters": rope(500.0, partial_rotary_factor=0.25)},
            "rotary_pct": {"rope_parameters": rope(10000.0, partial_rotary_factor=1.0)},
            "sequential residual": {"use_parallel_residual": True},
        },
    ),
]


def build(config: PreTrainedConfig) -> PreTrainedModel:
    """A float32 model with plain (eager) attention, in eval mode."""
    # The model keeps the config it is given and writes to it.
    config = copy.deepcopy(config)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


def with_changes(config: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    """A copy of ``config`` with some attributes replaced."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(config, name, copy.deepcopy(value))
    return config


@torch.no_grad()
def randomize(model: PreTrainedModel, rng: np.random.Generator) -> None:
    """Fill all parameters with random numbers, norms around one and biases included."""
    for module in model.modules():
        is_norm = type(module).__name__.endswith("Norm")
        for name, parameter in module.named_parameters(recurse=False):
            values = rng.standard_normal(tuple(parameter.shape))
            if is_norm and name == "weight":
                values = 1 + NORM_STD * values
            elif name == "bias":
                values = BIAS_STD * values
            else:
                values = WEIGHT_STD * values
            parameter.copy_(torch.from_numpy(values))
    # A tied output layer shares its parameter with the embedding, so it needs nothing more.


@torch.no_grad()
def compute_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Logits for one sequence, of shape (length, vocabulary)."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def continue_greedily(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], float]:
    """Greedy continuation, and the smallest lead of a chosen token over the runner-up."""
    token_ids = list(prompt)
    margins = []
    for _ in range(NEW_TOKENS):
        best = compute_logits(model, token_ids)[-1].topk(2)
        token_ids.append(best.indices[0].item())
        margins.append((best.values[0] - best.values[1]).item())
    return token_ids[len(prompt) :], min(margins)


def use_old_config_style(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a Llama config.json into the form that transformers 4 wrote."""
    config = dict(config)
    parameters = dict(config.pop("rope_parameters"))
    config["rope_theta"] = parameters.pop("rope_theta")
    rope_type = parameters.pop("rope_type")
    config["rope_scaling"] = None if rope_type == "default" else {"type": rope_type, **parameters}
    config["torch_dtype"] = config.pop("dtype")
    # Early Llama configs had no head_dim either; it follows from the other sizes.
    del config["head_dim"]
    return config


def save(variant: Variant, model: PreTrainedModel, expected: dict[str, Any], folder: Path) -> None:
    """Write the files of one variant, replacing its folder."""
    if folder.exists():
        shutil.rmtree(folder)
    model.save_pretrained(folder, max_shard_size=variant.max_shard_size)
    (folder / "generation_config.json").unlink()
    if variant.old_config:
        path = folder / "config.json"
        config = use_old_config_style(json.loads(path.read_text()))
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    text = json.dumps(expected, separators=(",", ":"))
    (folder / "expected.json").write_text(text + "\n")
    # Safetensors files are made readable for their owner only.
    for path in folder.iterdir():
        path.chmod(0o644)


def check(variant: Variant, model: PreTrainedModel, token_ids: list[int]) -> dict[str, float]:
    """Check that the variant is a useful test case. Returns what was measured.

    The measured numbers are the largest differences that a change makes to the logits of the last
    position.
    """
    logits = compute_logits(model, token_ids)
    if not (0.5 < logits.std() < 5 and logits.abs().max() < 20):
        raise RuntimeError(f"{variant.name}: logits too small or too large")

    def effect(other: torch.Tensor) -> float:
        return (other[-1] - logits[-1]).abs().max().item()

    def compute_ablated(changes: dict[str, Any]) -> torch.Tensor:
        other = build(with_changes(model.config, changes))
        other.load_state_dict(model.state_dict())
        return compute_logits(other, token_ids)

    changed = [(token_ids[0] + 1) % VOCAB_SIZE, *token_ids[1:]]
    swapped = [*token_ids[:-3], token_ids[-2], token_ids[-3], token_ids[-1]]
    effects = {
        "first token": effect(compute_logits(model, changed)),
        "order of tokens": effect(compute_logits(model, swapped)),
    }
    for name, changes in variant.ablations.items():
        effects[name] = effect(compute_ablated(changes))
    if model.config.model_type == "opt":
        # There is no setting to change here, so shift the table of position embeddings.
        other = copy.deepcopy(model)
        positions = other.model.decoder.embed_positions.weight
        positions.data = positions.data.roll(1, dims=0)
        effects["position embeddings"] = effect(compute_logits(other, token_ids))
    for name, value in effects.items():
        if value < 0.02:
            raise RuntimeError(f"{variant.name}: {name} changes the logits by only {value:.4f}")

    # Over the first positions a sliding window still covers everything.
    window = getattr(model.config, "sliding_window", None)
    if window is not None:
        full = compute_ablated({"sliding_window": None})
        differences = (full - logits).abs().amax(dim=-1)
        if differences[:window].max() > 1e-5 or differences[window] < 1e-3:
            raise RuntimeError(f"{variant.name}: the sliding window is not {window} positions")
    return effects


def make(variant: Variant, folder: Path) -> None:
    """Make, check and save one variant."""
    rng = np.random.default_rng([*variant.name.encode(), variant.seed])
    model = build(variant.config)
    randomize(model, rng)
    token_ids = rng.integers(0, VOCAB_SIZE, SEQUENCE_LENGTH).tolist()
    effects = check(variant, model, token_ids)

    logits = compute_logits(model, token_ids)
    greedy, margin = continue_greedily(model, token_ids[:PROMPT_LENGTH])
    if margin < 0.02 or len(set(greedy)) < 6:
        raise RuntimeError(f"{variant.name}: poor greedy continuation {greedy}, margin {margin}")
    expected = {
        "variant": variant.name,
        "made_with": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "token_ids": token_ids,
        "logits": [[round(value, 6) for value in row] for row in logits.tolist()],
        f"greedy_{NEW_TOKENS}": greedy,
    }
    save(variant, model, expected, folder)

    loaded = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    difference = (compute_logits(loaded.eval(), token_ids) - logits).abs().max().item()
    if difference > 1e-5:
        raise RuntimeError(f"{variant.name}: the saved model differs by {difference}")

    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{variant.name}: {size} bytes, logits std {logits.std():.2f}, ", end="")
    print(f"max {logits.abs().max():.2f}, greedy margin {margin:.3f}")
    for name, value in effects.items():
        print(f"    effect of {name}: {value:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny checkpoints used by the tests.")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(__file__).parent / "checkpoints",
        help="where to write them (default: %(default)s)",
    )
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for variant in VARIANTS:
        make(variant, folder / variant.name)


if __name__ == "__main__":
    main()
