"""flash-attn-4 (CuTe) for prompt chunks on Hopper and newer, where it is installed. Decodes stay with Triton, because
flash-attn-4 cannot split a long context on Hopper. So do steps that attend little: a call takes the host 136 to 300 us
beside a busy event loop, in each layer, and saves the device a third of what Triton's kernel takes."""

from functools import cached_property
from typing import Any

from torch import Tensor

from engine.cuda.step_inputs import StepInputs
from engine.cuda.triton_attention import TritonAttention
from engine.runners.step_shape import StepShape


class FlashAttention(TritonAttention):
    table_from = 6e6

    def is_repeatable(self, shape: StepShape) -> bool:
        return shape.pages == 0

    @cached_property
    def _attend(self) -> Any:
        from flash_attn.cute import flash_attn_varlen_func  # here: importing it takes seconds

        return flash_attn_varlen_func

    def prefill(self, queries: Tensor, layer_cache: Tensor, metadata: StepInputs, out: Tensor) -> None:
        if self.is_repeatable(metadata.shape):
            super().prefill(queries, layer_cache, metadata, out)
            return
        result = self._attend(
            queries,
            layer_cache[:, :, 0].permute(0, 2, 1, 3),  # [pages, page_size, kv_heads, head_dim]
            layer_cache[:, :, 1].permute(0, 2, 1, 3),
            cu_seqlens_q=metadata.cumulative_lengths,
            max_seqlen_q=metadata.longest_chunk,
            seqused_k=metadata.chunk_ends,
            page_table=metadata.page_table,
            causal=True,
        )
        out.copy_(result[0] if isinstance(result, tuple) else result)
