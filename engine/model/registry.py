"""The class of each family of runtime/checkpoint/families.py."""

from engine.model.llama import Llama
from engine.model.qwen3 import Qwen3

MODELS: dict[str, type[Llama]] = {"llama": Llama, "qwen3": Qwen3}
