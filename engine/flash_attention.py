"""flash-attn-4 (CuTe) for prompt chunks on Hopper and newer, where it is installed; decodes stay with Triton, which can
split a long context (flash-attn-4 cannot on Hopper)."""

import importlib.util
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from engine.step_inputs import StepInputs
from engine.triton_attention import TritonAttention


def flash_is_available(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype == torch.float32 or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


class FlashAttention(TritonAttention):
    with_page_table = True

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
