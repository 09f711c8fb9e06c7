"""gpt-oss (OpenAI): attention with sinks, biases everywhere, experts with an activation of their own. Every other layer
has a window."""

from torch import Tensor

from engine.model.experts import ClampedGate, Experts
from engine.model.families.experts import ExpertsLayer
from engine.model.families.llama import Llama
from engine.model.families.qwen2 import Qwen2Layer
from engine.model.weights import TensorSource


class GptOssLayer(ExpertsLayer, Qwen2Layer):
    """A checkpoint has all experts' weights in one tensor, [experts, in, out], gates and ups in turn."""

    def take_mlp(self, weights: TensorSource, prefix: str, hidden: int, width: int) -> None:
        config = self.config
        count, width = config.num_experts, config.expert_size
        self.router = weights.take(f"{prefix}.router.weight", count, hidden)
        self.router_bias = weights.take(f"{prefix}.router.bias", count)
        gates_ups = weights.take(f"{prefix}.experts.gate_up_proj", count, hidden, 2 * width).mT
        biases = weights.take(f"{prefix}.experts.gate_up_proj_bias", count, 2 * width)
        downs = weights.take(f"{prefix}.experts.down_proj", count, width, hidden).mT
        down_biases = weights.take(f"{prefix}.experts.down_proj_bias", count, hidden)
        clamped = ClampedGate(biases, config.swiglu_alpha, config.swiglu_limit)
        self.experts = Experts(gates_ups, downs, clamped, down_biases)

    def take_others(self, weights: TensorSource, prefix: str) -> None:
        super().take_others(weights, prefix)
        self.output_bias = weights.take(f"{prefix}.self_attn.o_proj.bias", self.config.hidden_size)
        self.sinks = weights.take(f"{prefix}.self_attn.sinks", self.config.num_heads)

    def after_attention(self, hidden: Tensor, mixed: Tensor) -> None:
        hidden.add_(self.output_bias)  # here and not with the product, because ranks add up their products
        super().after_attention(hidden, mixed)

    def scores(self, x: Tensor) -> Tensor:
        return super().scores(x).add_(self.router_bias)


class GptOss(Llama):
    layer_type = GptOssLayer
