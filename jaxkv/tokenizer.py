"""Text to token ids and back, for Hugging Face folders and GGUF files alike."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxkv.errors import CheckpointError, first_line

Message = Mapping[str, str]

#: How byte-level BPE cuts text before merging, by the name that GGUF files give it.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, list[Any]] = {
    "gpt-2": [],
    "smollm": [pre_tokenizers.Digits(individual_digits=True)],
    "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")],
    "qwen2": [
        pre_tokenizers.Split(Regex(_LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")), "isolated")
    ],
}
#: Token types of GGUF that are never text: control (3) and user-defined (4).
_SPECIAL_TYPES = {3: True, 4: False}


class Tokenizer:
    """A `tokenizers.Tokenizer` with the chat template of its model."""

    def __init__(
        self,
        backend: Backend,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with what the model puts around any text (often a first token)."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decoder(self) -> Callable[[int], str]:
        """A function that takes one token id after the other and gives the text that has become
        certain: a letter spread over several tokens comes out whole.
        """
        stream = decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self.backend, token) or ""

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises:
          ValueError: the model has no chat template.

        """
        if not self.chat_template:
            raise ValueError("this model has no chat template: give the prompt as a string")
        # A second to import, and only chats need it.
        with _quiet_import():
            from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                chat_template=self.chat_template,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return self.encode(rendered[0], add_special_tokens=False)

    def special_id(self, text: str) -> int | None:
        """The id of a special token, which decoding leaves out; None if `text` is not one."""
        token = self.backend.token_to_id(text)
        return token if token is not None and not self.decode([token]) else None

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return self.backend.get_vocab_size()


def from_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None when it holds none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    if not any((folder / name).exists() for name in names):
        return None
    with _quiet_import():
        from transformers import AutoTokenizer

    try:
        auto = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        backend = auto.backend_tokenizer
    except (AttributeError, ImportError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"cannot build the tokenizer of {folder}: {first_line(error)}"
        ) from error
    special = {k: str(v) for k, v in auto.special_tokens_map.items() if isinstance(v, str)}
    template = auto.chat_template
    if isinstance(template, dict):  # several, by name
        template = template.get("default")
    return Tokenizer(backend, template, special)


def from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata.

    Raises:
      CheckpointError: it is of a kind that cannot be rebuilt; a `tokenizer.json` beside the file
        is used then.

    """
    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    template = metadata.get("tokenizer.chat_template")
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    special = {}
    for name in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    beside = path.parent / "tokenizer.json"
    if kind != "gpt2" or cut not in _SPLITS:
        if beside.exists():
            return Tokenizer(Backend.from_file(os.fspath(beside)), template, special)
        raise CheckpointError(
            f"{path.name} has a tokenizer of kind {kind!r}, cut {cut!r}; supported: 'gpt2' with "
            f"{', '.join(_SPLITS)}. Put the model's tokenizer.json beside the file"
        )
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut == "llama-bpe"))
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *_SPLITS[cut],
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut in ("gpt-2", "smollm")),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [])
    backend.add_tokens(
        [
            AddedToken(token, special=_SPECIAL_TYPES[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in _SPECIAL_TYPES
        ]
    )
    if metadata.get("tokenizer.ggml.add_bos_token", cut == "llama-bpe") and special.get(
        "bos_token"
    ):
        _prepend(backend, special["bos_token"], vocab[special["bos_token"]])
    return Tokenizer(backend, template, special)


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Keeps transformers from advising to install PyTorch, which its tokenizers do not need."""
    name = "TRANSFORMERS_VERBOSITY"
    before = os.environ.get(name)
    os.environ.setdefault(name, "error")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _prepend(backend: Backend, token: str, token_id: int) -> None:
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=None, special_tokens=[(token, token_id)]
    )
