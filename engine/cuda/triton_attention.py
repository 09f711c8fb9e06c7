"""Attention with Baton's own Triton kernels: the default on CUDA, and in tests on CPU through Triton's interpreter."""

from torch import Tensor

from engine.cuda.step_inputs import StepInputs
from engine.kernels.decode_attention import FEW_ROWS, DecodeScratch, Rotation, decode_attention
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.rotate_store import rotate_store
from engine.model.attention import HeadNorms


class TritonAttention:
    """Implements `engine.model.attention.Attention`."""

    with_page_table = False  # whether prefill wants the chunks' block tables as rows of one matrix

    def __init__(self, angles: Tensor, scratch: DecodeScratch) -> None:
        """`angles`: RotaryEmbedding.table for every position that a sequence can have."""
        self.num_positions = len(angles)
        self._angles = angles
        self._scratch = scratch

    def store(self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: StepInputs) -> Tensor:
        query_norm, key_norm, eps = (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
        return rotate_store(
            qkv, layer_cache, metadata.slots, metadata.positions, self._angles, query_norm, key_norm, eps
        )

    def store_and_decode(
        self, qkv: Tensor, norms: HeadNorms | None, layer_cache: Tensor, metadata: StepInputs
    ) -> Tensor:
        if len(qkv) > FEW_ROWS:
            queries = self.store(qkv, norms, layer_cache, metadata)
            return decode_attention(queries, layer_cache, metadata.decode, self._scratch)
        query_norm, key_norm, eps = (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
        rotation = Rotation(metadata.slots, metadata.positions, self._angles, query_norm, key_norm, eps)
        return decode_attention(qkv, layer_cache, metadata.decode, self._scratch, rotation)

    def prefill(self, queries: Tensor, layer_cache: Tensor, metadata: StepInputs, out: Tensor) -> None:
        prefill_attention(queries, layer_cache, metadata.prefill, out)

    def decode(self, queries: Tensor, layer_cache: Tensor, metadata: StepInputs, out: Tensor) -> None:
        decode_attention(queries, layer_cache, metadata.decode, self._scratch, out=out)
