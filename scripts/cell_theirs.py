"""One measurement of a peer, in the peer's own environment; `benchmark_peers.py` runs it.

    python cell_theirs.py prepare '{"peer": ..., "model": GGUF_FILE_OR_FOLDER, "folder": OUT}'
    python cell_theirs.py measure CELL_IN_JSON

The first writes the checkpoint in the form that the peer reads, the second prints one line of JSON.
Nothing of jaxkv is imported here.
"""

import ctypes
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

THREADS = os.cpu_count() or 1
#: Decode steps that are timed, after as many that are not.
STEPS = 16
#: kvpress' names of our policies.
PRESSES = {"h2o": "ObservedAttentionPress", "snapkv": "SnapKVPress"}


def status(field):
    """Bytes of a field of this process's status (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def peak_beyond(run):
    """What `run` gives, its seconds, and the bytes by which the process grew in between."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start, status("VmHWM") - before


def prepare(job):
    """Writes the checkpoint as float32 safetensors, and for OpenVINO as its own format."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, folder = Path(job["model"]), Path(job["folder"])
    at = (
        {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
        if source.suffix == ".gguf"
        else {"pretrained_model_name_or_path": source}
    )
    plain = folder / "plain"
    AutoModelForCausalLM.from_pretrained(**at, dtype="float32").save_pretrained(plain)
    AutoTokenizer.from_pretrained(**at).save_pretrained(plain)
    if job["peer"] == "openvino":
        command = [Path(sys.executable).parent / "optimum-cli", "export", "openvino"]
        command += ["--model", plain, "--task", "text-generation-with-past"]
        subprocess.run([*command, "--weight-format", "fp32", folder / "openvino"], check=True)
    return {}


def torch_model(cell, attention="sdpa"):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    return AutoModelForCausalLM.from_pretrained(
        Path(cell["folder"]) / "plain", dtype=torch.float32, attn_implementation=attention
    ).eval()


def press(cell):
    import kvpress

    ratio = 1 - cell["kept"] / cell["tokens"]
    made = getattr(kvpress, PRESSES[cell["policy"]])(compression_ratio=ratio)
    return made, "eager" if cell["policy"] == "h2o" else "sdpa"


def torch_prompt(cell):
    """Seconds and bytes of a prompt, under a press if the cell keeps less than all."""
    import contextlib

    import torch
    from transformers import DynamicCache

    with torch.inference_mode():
        made, attention = press(cell) if cell["kept"] else (None, "sdpa")
        model = torch_model(cell, attention)
        tokens = torch.tensor(cell["ids"])[:, : cell["tokens"]]
        cache = DynamicCache()

        def run():
            with made(model) if made else contextlib.nullcontext():
                return model(tokens, past_key_values=cache, logits_to_keep=1).logits

        model(tokens[:, :64], past_key_values=DynamicCache())  # threads, buffers
        _, seconds, grown = peak_beyond(run)
    return {"ms": 1e3 * seconds, "extra_mb": grown / 1e6, "kept": cache.layers[0].keys.shape[2]}


def torch_decode(cell):
    """Milliseconds of a greedy step on a cache of random keys and values."""
    import torch
    from transformers import DynamicCache

    with torch.inference_mode():
        model = torch_model(cell)
        config = model.config
        shape = (cell["batch"], config.num_key_value_heads, cell["kept"] or cell["tokens"])
        dim = config.hidden_size // config.num_attention_heads
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(*shape, dim), torch.randn(*shape, dim), layer)
        token = torch.ones((cell["batch"], 1), dtype=torch.long)
        times = []
        for _ in range(2 * STEPS):
            start = time.perf_counter()
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            times.append(time.perf_counter() - start)
    size = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    return {"ms": 1e3 * sum(times[STEPS:]) / STEPS, "cache_mb": size / 1e6}


def torch_perplexity(cell):
    """Perplexity of what follows a prompt that a press has compressed."""
    import torch
    from transformers import DynamicCache

    prompt = cell["tokens"]
    with torch.inference_mode():
        made, attention = press(cell)
        model = torch_model(cell, attention)
        ids = torch.tensor(cell["ids"])
        cache = DynamicCache()
        with made(model):
            first = model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1).logits
        positions = torch.arange(prompt, ids.shape[1])[None]
        rest = model(ids[:, prompt:], past_key_values=cache, position_ids=positions).logits
        logits = torch.cat([first, rest[:, :-1]], 1).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, prompt:].flatten())
    return {"perplexity": math.exp(loss)}


def openvino(cell):
    """Reads a prompt and writes some tokens with OpenVINO GenAI's continuous batching."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.max_num_batched_tokens = 4096
    if cell["kept"]:
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(
            32, 128, cell["kept"] // 32 * 32, genai.AggregationMode.SUM
        )
    pipe = genai.ContinuousBatchingPipeline(
        str(Path(cell["folder"]) / "openvino"),
        scheduler,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": THREADS,
        },
    )
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = 2 * STEPS, True

    def run(rows):
        asked = [  # a request ends when nobody holds it
            pipe.add_request(i, ov.Tensor(np.array([row], np.int64)), config)
            for i, row in enumerate(rows)
        ]
        times = []
        while pipe.has_non_finished_requests():
            start = time.perf_counter()
            pipe.step()
            times.append(time.perf_counter() - start)
        assert all(len(one.read_all()[0].generated_ids) == 2 * STEPS for one in asked)
        return times

    run([row[:64] for row in cell["ids"]])  # kernels are made for shapes
    times, _, grown = peak_beyond(lambda: run([row[: cell["tokens"]] for row in cell["ids"]]))
    if cell["case"] == "decode":
        return {"ms": 1e3 * sum(times[-STEPS:]) / STEPS}
    prompt = times[: len(times) - 2 * STEPS + 1]
    return {"ms": 1e3 * sum(prompt), "extra_mb": grown / 1e6}


def measure(cell):
    run = {"decode": torch_decode, "prompt": torch_prompt, "perplexity": torch_perplexity}
    result = openvino(cell) if cell["peer"] == "openvino" else run[cell["case"]](cell)
    named = ("torch", "transformers", "kvpress", "openvino-genai")
    found = {d.name.lower(): d.version for d in importlib.metadata.distributions()}
    versions = {name: found[name] for name in named if name in found}
    return result | {"peak_mb": status("VmHWM") / 1e6, "versions": versions}


if __name__ == "__main__":
    action, text = sys.argv[1:]
    if action == "measure":
        text = Path(text).read_text(encoding="utf-8")
    print(json.dumps({"prepare": prepare, "measure": measure}[action](json.loads(text))))
