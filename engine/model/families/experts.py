"""Mixture of experts: of many MLPs a router chooses a few for each token (Mixtral; Qwen3-MoE)."""

from typing import ClassVar

from torch import Tensor

from engine.model.experts import Experts
from engine.model.families.llama import Llama, LlamaLayer
from engine.model.families.qwen3 import Qwen3Layer
from engine.model.weights import TensorSource


class ExpertsLayer(LlamaLayer):
    """Each rank has a part of each expert's width."""

    block: ClassVar[str] = "mlp"
    names: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    def take_mlp(self, weights: TensorSource, prefix: str, hidden: int, width: int) -> None:
        count, width = self.config.num_experts, self.config.expert_size
        block = f"{prefix.removesuffix('mlp')}{self.block}"
        gate, up, down = self.names
        experts = [f"{block}.experts.{expert}" for expert in range(count)]
        self.router = weights.take(f"{block}.gate.weight", count, hidden)
        gates_ups = {f"{expert}.{name}.weight": (width, hidden) for expert in experts for name in (gate, up)}
        downs = {f"{expert}.{down}.weight": (hidden, width) for expert in experts}
        self.experts = Experts(
            weights.take_matrices(gates_ups).view(count, 2 * width, hidden),
            weights.take_matrices(downs).view(count, hidden, width),
        )

    def add_mlp(self, rows: Tensor) -> None:
        config, operations = self.config, self.operations
        x = operations.norm(rows, self.mlp_norm, config.rms_norm_eps)
        scores = self.scores(x)
        chosen = operations.choose_experts(scores, config.experts_per_token, normed=config.norms_expert_weights)
        operations.add_experts(rows, x, chosen, self.experts)

    def scores(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, experts], the router's."""
        return self.operations.linear(x, self.router)


class MixtralLayer(ExpertsLayer):
    block: ClassVar[str] = "block_sparse_moe"
    names: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")


class Qwen3MoeLayer(ExpertsLayer, Qwen3Layer):
    pass


class Mixtral(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = MixtralLayer


class Qwen3Moe(Llama):
    layer_type: ClassVar[type[LlamaLayer]] = Qwen3MoeLayer
