"""gpt-oss (OpenAI): attention with sinks, biases everywhere, experts with an activation of their own. Every other layer
has a window."""

import torch
from torch import Tensor

from engine.model.families.experts import ExpertsLayer
from engine.model.families.llama import Llama
from engine.model.families.qwen2 import Qwen2Layer
from engine.model.weights import TensorSource


class GptOssLayer(ExpertsLayer, Qwen2Layer):
    """A checkpoint has all experts' weights in one tensor, [experts, in, out], gates and ups in turn."""

    def take_mlp(self, weights: TensorSource, prefix: str, hidden: int, width: int) -> None:
        count, width = self.config.num_experts, self.config.expert_size
        self.router = weights.take(f"{prefix}.router.weight", count, hidden)
        self.router_bias = weights.take(f"{prefix}.router.bias", count)
        self.gates_ups = weights.take(f"{prefix}.experts.gate_up_proj", count, hidden, 2 * width).mT
        self.gate_up_biases = weights.take(f"{prefix}.experts.gate_up_proj_bias", count, 2 * width)
        self.downs = weights.take(f"{prefix}.experts.down_proj", count, width, hidden).mT
        self.down_biases = weights.take(f"{prefix}.experts.down_proj_bias", count, hidden)

    def take_others(self, weights: TensorSource, prefix: str) -> None:
        super().take_others(weights, prefix)
        self.output_bias = weights.take(f"{prefix}.self_attn.o_proj.bias", self.config.hidden_size)
        self.sinks = weights.take(f"{prefix}.self_attn.sinks", self.config.num_heads)

    def after_attention(self, hidden: Tensor, mixed: Tensor) -> None:
        hidden.add_(self.output_bias)  # here and not with the product, because ranks add up their products
        super().after_attention(hidden, mixed)

    def scores(self, x: Tensor) -> Tensor:
        return super().scores(x).add_(self.router_bias)

    def activations(self, x: Tensor, expert: int) -> Tensor:
        gates_ups = self.operations.linear(x, self.gates_ups[expert]).add_(self.gate_up_biases[expert])
        limit = self.config.swiglu_limit
        gate, up = gates_ups[:, ::2].clamp(max=limit), gates_ups[:, 1::2].clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(self.config.swiglu_alpha * gate)

    def add_experts(self, rows: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> None:
        shares = weights.new_zeros(len(x), self.config.num_experts).scatter_(1, chosen, weights)
        rows.addmm_(shares, self.down_biases)  # not among what ranks add up, as above
        super().add_experts(rows, x, weights, chosen)


class GptOss(Llama):
    layer_type = GptOssLayer
