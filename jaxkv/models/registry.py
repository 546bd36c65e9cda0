"""Which model class serves which architecture: a new family is one file and one line here."""

from jaxkv.models.base import CausalLM
from jaxkv.models.gpt_neox import GPTNeoX
from jaxkv.models.llama import Llama
from jaxkv.models.opt import OPT

#: The `architectures` entry of a Hugging Face `config.json` -> model class.
ARCHITECTURES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
    "OPTForCausalLM": OPT,
    "GPTNeoXForCausalLM": GPTNeoX,
}
