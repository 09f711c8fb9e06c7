"""Which class serves which architecture of `runtime.checkpoint.model_config.ARCHITECTURES`."""

from engine.model.llama import Llama
from engine.model.qwen3 import Qwen3

MODELS: dict[str, type[Llama]] = {"llama": Llama, "qwen3": Qwen3}
