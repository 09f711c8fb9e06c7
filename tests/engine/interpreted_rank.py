"""A rank that runs the GPU's runner on CPU, in Triton's interpreter: `python -m tests.engine.interpreted_rank`, as
engine/ranks/rank_process.py. The test that starts it builds rank 0's part with `interpreted_part`."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from pathlib import Path

import torch

from engine.cuda.cuda_build import build_cuda_runner
from engine.kernels.linear import small_linear
from engine.loading.loaded_model import LoadedModel
from engine.loading.model_memory import ModelMemory
from engine.model.weights import Weights
from engine.parallel.collective import Collective, own_shard
from engine.ranks import rank_process
from engine.ranks.rank_commands import Load
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab

CPU = torch.device("cpu")
NUM_BLOCKS = 40
FEW_LARGE_PROGRAMS = 1 << 16, 1  # the interpreter's time goes by programs, whatever their size
MAX_MODEL_LEN = 512


def interpreted_part(load: Load, rank: int) -> LoadedModel:
    """`load.config` says all but the number of blocks."""
    config = load.config
    collective = (
        Collective(Path(load.meeting), rank, config.tensor_parallel, CPU) if config.tensor_parallel > 1 else None
    )
    shard = own_shard(load.model, collective)
    heads = len(shard.kv_heads)
    layout = SlabLayout(load.model.num_layers, NUM_BLOCKS, heads, config.block_size, load.model.head_dim, "float32")
    slab = Slab(layout)
    weights = Weights(Path(load.folder or ""), torch.float32, None, shard)
    runner = build_cuda_runner(
        load.model,
        weights,
        slab.tensor,
        load.eos_token_ids,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_model_len=MAX_MODEL_LEN,
        flash=False,
        collective=collective,
    )
    runner.capture()
    return LoadedModel(runner, slab, ModelMemory(weights, slab), weights.dtype)


if __name__ == "__main__":
    small_linear.TILE, small_linear.MIN_PROGRAMS = FEW_LARGE_PROGRAMS
    rank_process.main(interpreted_part)
