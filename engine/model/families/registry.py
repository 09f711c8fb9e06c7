"""The class of each family of runtime/checkpoint/families.py."""

from engine.model.families.experts import Mixtral, Qwen3Moe
from engine.model.families.gemma import Gemma2, Gemma3
from engine.model.families.gpt_oss import GptOss
from engine.model.families.llama import Llama
from engine.model.families.olmo import Olmo
from engine.model.families.qwen2 import Qwen2
from engine.model.families.qwen3 import Qwen3

MODELS: dict[str, type[Llama]] = {
    "llama": Llama,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "mistral": Llama,
    "ministral": Llama,
    "mistral3": Llama,
    "phi3": Llama,
    "smollm3": Llama,
    "granite": Llama,
    "olmo2": Olmo,
    "olmo3": Olmo,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "mixtral": Mixtral,
    "qwen3moe": Qwen3Moe,
    "gpt-oss": GptOss,
}
