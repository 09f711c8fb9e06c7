"""Loads one model onto several devices, a process for each: the whole of tensor parallelism as a worker sees it.

Until the model is loaded all ranks do the same, so they meet in the same collectives; from then on rank 0 leads: its
runner tells the others of each step before it begins.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from baton.config import EngineConfig, TransferConfig
from baton.errors import BatonError, ConfigError, RankLostError
from engine.batch import Batch, LayerDone, Runner, StepOnItsWay
from engine.collective import Collective
from engine.loaded_model import LoadedModel, load_model
from engine.model_files import ModelFiles
from engine.model_runner import resolve_device
from engine.rank_commands import ExportSlab, Load
from engine.ranked_sender import RankedSender
from engine.ranks import Ranks, end_process
from engine.shard import FIELD, shard_of
from kvtransfer.adopted_slab import AdoptedSlab
from kvtransfer.identity import SlabIdentity
from kvtransfer.sending import KvSender
from kvtransfer.slab import Slab

LOAD_TIMEOUT_S = 1800.0


class LeadRunner:
    """Implements `engine.batch.Runner` around rank 0's own. When a step fails on one rank, the others are in the middle
    of it: no other step can follow."""

    def __init__(self, inner: Runner, ranks: Ranks) -> None:
        self.num_layers = inner.num_layers
        self.depth = inner.depth
        self._inner = inner
        self._ranks = ranks

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> StepOnItsWay:
        """Raises RankLostError alone."""
        try:
            return self._inner.submit(batch, layer_done)
        except RankLostError:
            raise
        except Exception as error:  # often it only means that another rank has died
            problem = f"failed in a step that the others are in: {type(error).__name__}: {error}"
            raise self._ranks.dead() or RankLostError(0, os.getpid(), problem) from error


@dataclass(frozen=True, slots=True)
class TensorParallelModel:
    """As `engine.loaded_model.LoadedModel`. `slab` is rank 0's: those of the others have as many blocks."""

    runner: Runner
    slab: Slab
    own: LoadedModel
    ranks: Ranks

    def sender(self, identity: SlabIdentity, config: TransferConfig) -> KvSender:
        return RankedSender(self.own.sender(identity, config), identity, config, self.ranks)

    def other_slabs(self) -> list[AdoptedSlab]:
        """Raises RankLostError, or UnavailableError when this device cannot reach another rank's memory."""
        self.ranks.tell(ExportSlab())
        slabs: list[AdoptedSlab] = []
        with ExitStack() as on_failure:
            for rank in range(1, self.ranks.size):
                slab = self._adopt(rank, self.ranks.exported_slab(rank))
                on_failure.callback(slab.close)
                slabs.append(slab)
            on_failure.pop_all()
        return slabs

    def _adopt(self, rank: int, fd: int) -> AdoptedSlab:
        try:
            return AdoptedSlab(self.slab.layout, self.slab.driver, fd, f"rank {rank}")
        finally:
            os.close(fd)

    def close(self) -> None:
        """Once the engine's thread has ended."""
        self.ranks.close()
        self.own.close()


def load_tensor_parallel(
    files: ModelFiles,
    config: EngineConfig,
    on_lost: Callable[[RankLostError], None] = end_process,
    *,
    random_weights: bool = False,
) -> TensorParallelModel:
    """`config.tensor_parallel` ranks, of which this process is the first. Raises ConfigError, ModelError, and
    RankLostError when a rank ends meanwhile and `on_lost` returns."""
    size, device = config.tensor_parallel, resolve_device(config)
    shard_of(files.config, 0, size)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(FIELD, f"{size} ranks need as many GPUs, and {torch.cuda.device_count()} are visible here")
    ranks = Ranks(size, on_lost)
    try:
        folder = None if random_weights else str(files.folder)
        load = ranks.tell(Load(str(ranks.meeting), folder, files.config, files.eos_token_ids, config))
        ranks.collective = Collective(ranks.meeting, 0, size, device)
        own = load_model(files, config, ranks.collective, random_weights=random_weights)
        ranks.wait_done(load, LOAD_TIMEOUT_S)
    except Exception as error:
        lost = None if isinstance(error, BatonError) else ranks.dead()
        ranks.close(timeout_s=0)
        if lost is None:
            raise
        raise lost from error
    return led_by(own, ranks)


def led_by(own: LoadedModel, ranks: Ranks) -> TensorParallelModel:
    """From now on `own`, rank 0's part, is not used alone: the others have loaded theirs."""
    ranks.loaded()
    own.runner.tell = ranks.tell
    return TensorParallelModel(LeadRunner(own.runner, ranks), own.slab, own, ranks)
