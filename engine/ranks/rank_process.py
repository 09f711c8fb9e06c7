"""`python -m engine.ranks.rank_process RANK DESCRIPTOR...`: a rank of a tensor-parallel worker other than rank 0.

The process knows neither sequences nor requests: it carries out rank 0's commands, one after the other. A failure ends
the process, and with it the worker.
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from engine.loading.loaded_model import LoadedModel, load_model
from engine.model.checkpoint import Checkpoint
from engine.parallel.collective import Collective
from engine.ranks.command_channel import CommandReader, ReaderEnds
from engine.ranks.rank_commands import (
    CloseDisk,
    ComeAfter,
    EndUpdate,
    ExportSlab,
    FinishKv,
    Load,
    LoadKv,
    MoveDisk,
    OpenDisk,
    OpenTier,
    ReadCopy,
    ReadWeights,
    Sleep,
    Stop,
    StoreKv,
    TakeTensor,
    Wake,
    WipeDisk,
    WriteCopy,
    decode_command,
)
from engine.ranks.rank_pushes import RankPushes
from engine.ranks.rank_reports import ReportWriter
from engine.ranks.ranked_disk import RankDisk
from engine.ranks.ranked_tier import RankTier
from engine.runners.auto import resolve_device
from engine.runners.step_shape import DeviceDraw, DeviceStep, TorchStep
from kvtransfer.slab.head_plan import Shard
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.surroundings import LoggingConfig
from runtime.errors import BatonError, ProtocolError
from runtime.telemetry.logging import configure_logging

Build = Callable[[Load, int], LoadedModel]


def main(build: Build | None = None) -> None:
    """`build` replaces `load_part` in tests."""
    rank, reports, *ends = map(int, sys.argv[1:])
    configure_logging(LoggingConfig(level="warning"), f"rank-{rank}")
    try:
        serve(rank, CommandReader(ReaderEnds(*ends)), ReportWriter(reports), build or load_part)
    except BatonError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # at once: the collectives' own exits would wait for each other


def serve(rank: int, commands: CommandReader, reports: ReportWriter, build: Build) -> None:
    """Carries out commands until Stop. Raises ProtocolError when the first command is not the only Load, or the writer
    has gone."""
    load = decode_command(commands.receive())
    if not isinstance(load, Load):
        raise ProtocolError("rank 0", f"began with {type(load).__name__}")
    part = build(load, rank)
    shard = Shard(rank, load.config.tensor_parallel)
    pushes = RankPushes(part.slab, shard, load.model.num_kv_heads, reports.push_ended)
    tier = RankTier(part.slab, reports.kv_moved)
    disk = RankDisk(rank, tier, part.slab.layout, reports.copy_ended)
    commands.done()
    while True:
        match decode_command(commands.receive()):
            case TorchStep() | DeviceStep() | DeviceDraw() as step:
                part.runner.follow(step, pushes.take_layer_done(), tier.take_moves())
            case OpenTier() | StoreKv() | LoadKv() | ComeAfter() | FinishKv() as copy:
                tier.obey(copy)
            case OpenDisk() | WriteCopy() | ReadCopy() | WipeDisk() | MoveDisk() | CloseDisk() as copy:
                disk.obey(copy)
            case ExportSlab():
                reports.slab_exported(part.slab.export())
            case Sleep(level):
                part.memory.sleep(level)
            case Wake(tags):
                part.memory.wake(tags)
            case TakeTensor(name, shape):
                part.receive(name, shape)
            case EndUpdate():
                part.memory.end_update()
            case ReadWeights(folder):
                part.memory.read(Checkpoint(Path(folder)))
            case Stop():
                return
            case Load():
                raise ProtocolError("rank 0", "loads a second time")
            case push_command:
                pushes.obey(push_command)
        commands.done()


def load_part(load: Load, rank: int) -> LoadedModel:
    """This rank's part of the model, on GPU number `rank` or the CPU. Raises ConfigError or ModelError."""
    files = ModelFiles(Path(load.folder or "."), "", load.model, load.eos_token_ids)
    device = resolve_device(load.config)
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(rank)
    collective = Collective(Path(load.meeting), rank, load.config.tensor_parallel, device)
    return load_model(files, load.config, collective, random_weights=load.folder is None)


if __name__ == "__main__":
    main()
