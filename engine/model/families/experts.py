"""Mixture of experts: of many MLPs a router chooses a few for each token (Mixtral; Qwen3-MoE)."""

from typing import ClassVar

import torch
from torch import Tensor

from engine.model.families.llama import Llama, LlamaLayer
from engine.model.families.qwen3 import Qwen3Layer
from engine.model.weights import TensorSource


class ExpertsLayer(LlamaLayer):
    """Each rank has a part of each expert's width. Without kernels of our own: experts compute one after the other."""

    block: ClassVar[str] = "mlp"
    names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    def take_mlp(self, weights: TensorSource, prefix: str, hidden: int, width: int) -> None:
        count, width = self.config.num_experts, self.config.expert_size
        block = f"{prefix.removesuffix('mlp')}{self.block}"
        gate, up, down = self.names
        experts = [f"{block}.experts.{expert}" for expert in range(count)]
        self.router = weights.take(f"{block}.gate.weight", count, hidden)
        gates_ups: dict[str, tuple[int, ...]]
        downs: dict[str, tuple[int, ...]]
        gates_ups = {f"{expert}.{name}.weight": (width, hidden) for expert in experts for name in (gate, up)}
        downs = {f"{expert}.{down}.weight": (hidden, width) for expert in experts}
        self.gates_ups = weights.take_fused(gates_ups).view(count, 2 * width, hidden)
        self.downs = weights.take_fused(downs).view(count, hidden, width)

    def add_mlp(self, rows: Tensor) -> None:
        config = self.config
        x = self.operations.norm(rows, self.mlp_norm, config.rms_norm_eps)
        shares = self.scores(x).softmax(-1, dtype=torch.float32)
        weights, chosen = shares.topk(config.experts_per_token, dim=-1)
        if config.norms_expert_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        self.add_experts(rows, x, weights.to(x.dtype), chosen)

    def scores(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, experts], the router's."""
        return self.operations.linear(x, self.router)

    def add_experts(self, rows: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """Adds what the experts make of `x`. weights, chosen: [num_tokens, experts of each]."""
        operations = self.operations
        added = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            tokens, places = torch.where(chosen == expert)
            outputs = operations.linear(self.activations(x[tokens], expert), self.downs[expert])
            added.index_add_(0, tokens, outputs * weights[tokens, places, None])
        operations.add(rows, added)

    def activations(self, x: Tensor, expert: int) -> Tensor:
        return self.operations.gated_linear(x, self.gates_ups[expert])


class MixtralLayer(ExpertsLayer):
    block: ClassVar[str] = "block_sparse_moe"
    names: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")


class Qwen3MoeLayer(ExpertsLayer, Qwen3Layer):
    pass


class Mixtral(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = MixtralLayer


class Qwen3Moe(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = Qwen3MoeLayer
