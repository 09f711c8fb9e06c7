"""Puts a CudaRunner together. Apart from the runner because everything in here needs Triton."""

import torch
from torch import Tensor

from engine.cuda_runner import CudaRunner
from engine.flash_attention import FlashAttention
from engine.kernels.decode_attention import DecodeScratch
from engine.kernels.prefill_attention import query_tile
from engine.model_config import ModelConfig
from engine.models.registry import MODELS
from engine.rope import RotaryEmbedding
from engine.sampler import Sampler
from engine.step_inputs import StepBuffer
from engine.triton_attention import TritonAttention
from engine.triton_operations import TritonOperations
from engine.weights import TensorSource

_PROGRAMS_PER_PROCESSOR = 4  # of decode attention, enough to hide the latency of memory


def build_cuda_runner(
    config: ModelConfig,
    weights: TensorSource,
    slab: Tensor,
    eos_token_ids: frozenset[int],
    *,
    max_batch_tokens: int,
    max_running: int,
    max_model_len: int,
    flash: bool,
) -> CudaRunner:
    """On the slab's device, in its dtype. CUDA graphs are captured later, see CudaRunner.capture. Raises ModelError."""
    device, block_size = slab.device, slab.shape[4]
    extra_pieces = -(-_PROGRAMS_PER_PROCESSOR * _num_processors(device) // config.num_kv_heads)
    max_rows = min(max_running, max_batch_tokens)
    sampled = torch.zeros(max_batch_tokens, dtype=torch.int32, device=device)
    model = MODELS[config.architecture](config, weights, TritonOperations(sampled))
    scratch = DecodeScratch.allocate(
        max_rows, extra_pieces, config.num_heads, config.num_kv_heads, config.head_dim, device
    )
    attention_type = FlashAttention if flash else TritonAttention
    attention = attention_type(RotaryEmbedding(config, device).table(max_model_len), scratch)
    buffer = StepBuffer(
        max_tokens=max_batch_tokens,
        table_words=max_running * -(-max_model_len // block_size),
        block_size=block_size,
        extra_pieces=extra_pieces,
        query_tile=query_tile(slab.dtype),
        with_page_table=attention.with_page_table,
        device=device,
    )
    return CudaRunner(model, attention, slab, sampled, buffer, Sampler(eos_token_ids), max_rows)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter's programs run one after the other; this splits contexts now and then
    return torch.cuda.get_device_properties(device).multi_processor_count
