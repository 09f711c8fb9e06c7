"""Builds a CudaRunner, its KV slab and its CUDA graphs. Everything here needs Triton."""

import dataclasses
from dataclasses import dataclass

import structlog
import torch

from engine.cuda.cuda_runner import CudaRunner
from engine.cuda.flash_attention import FlashAttention
from engine.cuda.mask_buffer import MaskBuffer
from engine.cuda.step_inputs import StepBuffer
from engine.cuda.triton_attention import Angles, TritonAttention
from engine.cuda.triton_operations import TritonOperations
from engine.kernels.attention.decode_attention import DecodeScratch
from engine.kernels.attention.prefill_attention import query_tile
from engine.kernels.attention.scores import Scores
from engine.model.attention import Caches
from engine.model.families.llama import Llama
from engine.model.families.registry import MODELS
from engine.model.operations import Operations
from engine.model.weights import TensorSource
from engine.parallel.collective import Collective, own_shard
from engine.parallel.peer_push import make_peer_push
from engine.parallel.peer_sum import make_peer_sum
from engine.parallel.sharded_operations import ShardedOperations
from engine.runners.cache_groups import in_two_groups
from engine.runners.sampler import Sampler
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from runtime.checkpoint.model_config import ModelConfig
from runtime.device.drivers import memory_of
from runtime.errors import ConfigError

log = structlog.get_logger()

_GRAPH_BYTES = 1 << 30  # kept by CUDA graphs: their kernels' parameters and one step's activations
_SPARE_SHARE = 0.03  # of the device's memory, for each process's fragmentation and other libraries
_PROGRAMS_PER_PROCESSOR = 4  # of decode attention that run at once (benchmarks/kernel_speed.py, on an H200)


def build_cuda_runner(
    config: ModelConfig,
    weights: TensorSource,
    caches: Caches,
    eos_token_ids: frozenset[int],
    *,
    max_batch_tokens: int,
    max_running: int,
    max_model_len: int,
    flash: bool,
    collective: Collective | None = None,
) -> CudaRunner:
    """A runner on the caches' device, in the weights' dtype; CudaRunner.capture records its CUDA graphs. Raises
    ModelError.

    `config` is the whole model's; with several ranks, `weights` and `caches` are this rank's.
    """
    device, block_size = caches[0].device, caches[0].shape[3]
    shard = own_shard(config, collective)
    config = shard.config
    programs_at_once = max(1, _PROGRAMS_PER_PROCESSOR * _num_processors(device) // config.num_kv_heads)
    if collective is not None:  # because rank 0's packed words assign work to programs
        programs_at_once = collective.smallest(programs_at_once)
    max_rows = min(max_running, max_batch_tokens)
    sampled = torch.zeros(max_batch_tokens, dtype=torch.int32, device=device)
    operations: Operations = TritonOperations(sampled)
    if collective is not None:
        few_rows = make_peer_sum(collective, device, weights.dtype, config.hidden_size)
        many_rows = make_peer_push(collective, device, weights.dtype, max_batch_tokens, config.hidden_size)
        operations = ShardedOperations(operations, collective, few_rows, many_rows)
    model = MODELS[config.architecture](config, weights, operations, shard.vocabulary)
    scratch = DecodeScratch.allocate(
        max_rows, programs_at_once, config.num_heads, config.num_kv_heads, config.head_dim, device
    )
    attentions = _attentions(model, scratch, max_model_len, device, flash=flash)
    buffer = StepBuffer(
        max_tokens=max_batch_tokens,
        max_rows=max_rows,
        table_words=max_running * -(-max_model_len // block_size),
        block_size=block_size,
        programs_at_once=programs_at_once,
        query_tile=query_tile(weights.dtype),
        table_from=attentions[0].table_from,
        window=config.widest_window,
        device=device,
    )
    masks = MaskBuffer(min(2 * max_running, max_batch_tokens), config.vocab_size, device)  # decodes and new prompts
    return CudaRunner(model, attentions, caches, sampled, buffer, masks, Sampler(eos_token_ids), max_rows, collective)


def _attentions(
    model: Llama, scratch: DecodeScratch, num_positions: int, device: torch.device, *, flash: bool
) -> list[TritonAttention]:
    """Of each layer. Invariant: layers with a window have the same."""
    config, kind = model.config, FlashAttention if flash else TritonAttention
    angles = {
        rope: Angles.of(rope, num_positions, config.head_dim, device)
        for rope in {config.rope_of(layer) for layer in range(config.num_layers)}
    }
    return [
        kind(
            angles[config.rope_of(layer.index)],
            scratch,
            Scores(config.window(layer.index), config.attention_softcap, layer.sinks),
        )
        for layer in model.layers
    ]


@dataclass(frozen=True, slots=True)
class GpuEngine:
    runner: CudaRunner
    slab: Slab


def build_on_gpu(
    config: ModelConfig,
    weights: TensorSource,
    eos_token_ids: frozenset[int],
    *,
    kv_dtype: str,
    block_size: int,
    kv_bytes: int | None,
    max_batch_tokens: int,
    max_running: int,
    max_model_len: int,
    flash: bool,
    graphs: bool = True,
    gpu_share: int = 1,
    memory_share: float = 0.97,
    collective: Collective | None = None,
) -> GpuEngine:
    """Loads the model, allocates the KV slab and captures graphs. The slab takes `kv_bytes`, or, when None, the memory
    that the largest step leaves. All ranks call it together and get as many blocks as the rank with the least room has.

    gpu_share: number of processes that share the device, each with an equal part.
    memory_share: part of the device's memory that may be in use, whoever uses it.

    Raises ModelError, and ConfigError when there is no room for one KV block, or for `kv_bytes`.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    num_kv_heads = len(own_shard(config, collective).kv_heads)
    one_block = SlabLayout(config.num_layers, 1, num_kv_heads, block_size, config.head_dim, kv_dtype)
    probe = Slab(one_block, driver := memory_of(device))
    runner = build_cuda_runner(
        config,
        weights,
        probe.layers,
        eos_token_ids,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_model_len=max_model_len,
        flash=flash,
        collective=collective,
    )
    peak = runner.measure_peak(max_model_len)
    free, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_reserved(device) + (weights.memory.nbytes if weights.memory else 0)
    room, part = kv_room(total, free, taken, peak + _GRAPH_BYTES, gpu_share=gpu_share, memory_share=memory_share)
    wanted = part if kv_bytes is None else kv_bytes
    num_blocks = wanted // one_block.nbytes if wanted <= room else 0
    num_blocks = num_blocks if collective is None else collective.smallest(num_blocks)
    if num_blocks < 1:
        problem = f"{max(room, 0) >> 20} MiB are left beside the weights and a step, which takes {peak >> 20} MiB"
        raise ConfigError("engine.kv_memory", f"{problem}; a block takes {one_block.nbytes / 2**20:.1f} MiB")
    one_group = dataclasses.replace(one_block, num_blocks=num_blocks)
    layout = in_two_groups(one_group, config, max_running, max_batch_tokens, max_model_len)
    slab = Slab(layout, driver)
    runner.attach(slab.layers)
    probe.close()
    if graphs:
        runner.capture()
    log.info("gpu engine built", blocks=layout.num_blocks, kv_bytes=layout.nbytes, peak_bytes=peak, flash=flash)
    return GpuEngine(runner, slab)


def kv_room(total: int, free: int, taken: int, step: int, *, gpu_share: int, memory_share: float) -> tuple[int, int]:
    """Bytes that the KV slab may take of a device: all of them, and this process's part of them.

    taken: by this process, of the bytes that are not free. step: kept for a step and its graphs.
    """
    budget = int(total * memory_share)
    room = budget - (total - free) - step
    others = (gpu_share - 1) * int(total * _SPARE_SHARE)
    return room, min(room, (budget - others) // gpu_share - taken - step) if gpu_share > 1 else room


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter runs programs one after the other; with two, some contexts are split
    return torch.cuda.get_device_properties(device).multi_processor_count
