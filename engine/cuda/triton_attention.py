"""Attention with Baton's own Triton kernels: on CUDA, and in tests on a CPU through Triton's interpreter."""

from math import inf

from torch import Tensor

from engine.cuda.step_inputs import StepInputs
from engine.kernels.decode_attention import FEW_ROWS, DecodeScratch, decode_attention
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.rotate_store import Rotation, rotate_store
from engine.model.attention import HeadNorms
from engine.runners.step_shape import StepShape


class TritonAttention:
    """Implements `engine.model.attention.Attention`."""

    table_from = inf  # pairs of a query and a key it sees from which on a step's chunks have one page table

    def __init__(self, angles: Tensor, scratch: DecodeScratch) -> None:
        """`angles`: RotaryEmbedding.table, float32 [positions, head_dim], for every position of a sequence."""
        self.num_positions = len(angles)
        self._angles = angles
        self._scratch = scratch

    def is_repeatable(self, shape: StepShape) -> bool:
        """Whether QuickLaunch makes all launches of such a step, so that NotedLaunches has them."""
        return True

    def store(self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: StepInputs) -> Tensor:
        return rotate_store(qkv, layer_cache, self._rotation(norms, metadata))

    def store_and_decode(
        self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: StepInputs
    ) -> Tensor:
        if len(qkv) > FEW_ROWS:
            queries = self.store(qkv, norms, layer_cache, metadata)
            return decode_attention(queries, layer_cache, metadata.decode, self._scratch)
        return decode_attention(qkv, layer_cache, metadata.decode, self._scratch, self._rotation(norms, metadata))

    def prefill(self, queries: Tensor, layer_cache: Tensor, metadata: StepInputs, out: Tensor) -> None:
        prefill_attention(queries, layer_cache, metadata.prefill, out)

    def decode(self, queries: Tensor, layer_cache: Tensor, metadata: StepInputs, out: Tensor) -> None:
        decode_attention(queries, layer_cache, metadata.decode, self._scratch, out=out)

    def _rotation(self, norms: HeadNorms | None, metadata: StepInputs) -> Rotation:
        query_norm, key_norm, eps = (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
        return Rotation(metadata.slots, metadata.positions, self._angles, query_norm, key_norm, eps)
