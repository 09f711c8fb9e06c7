"""flash-attn-4 (CuTe) for prompt chunks on Hopper and newer, where it is installed. Decodes stay with Triton, because
flash-attn-4 cannot split a long context on Hopper."""

from functools import cached_property
from typing import Any

from torch import Tensor

from engine.cuda.step_inputs import StepInputs
from engine.cuda.triton_attention import TritonAttention


class FlashAttention(TritonAttention):
    with_page_table = True
    is_repeatable = False

    @cached_property
    def _attend(self) -> Any:
        from flash_attn.cute import flash_attn_varlen_func  # here: importing it takes seconds

        return flash_attn_varlen_func

    def prefill(self, queries: Tensor, layer_cache: Tensor, metadata: StepInputs, out: Tensor) -> None:
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
