"""Which class serves which architecture of `engine.model_config.ARCHITECTURES`."""

from engine.models.llama import Llama
from engine.models.qwen3 import Qwen3

MODELS: dict[str, type[Llama]] = {"llama": Llama, "qwen3": Qwen3}
