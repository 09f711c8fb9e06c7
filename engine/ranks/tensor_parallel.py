"""One model on several devices, with a process for each: all that a worker sees of tensor parallelism.

While the model is loaded, all ranks run the same code and meet in the same collectives. From then on rank 0 leads: its
runner tells the other ranks of each step before the step begins.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence as Run
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton_proto.worker import KV_CACHE
from engine.loading.loaded_model import LoadedModel, load_model
from engine.loading.model_memory import Tensors
from engine.model.checkpoint import Checkpoint
from engine.model.shard import FIELD, shard_of
from engine.parallel.collective import Collective
from engine.ranks.rank_commands import EndUpdate, ExportSlab, Load, ReadWeights, Sleep, TakeTensor, Wake
from engine.ranks.ranked_disk import RankedDisk
from engine.ranks.ranked_sender import RankedSender
from engine.ranks.ranked_tier import RankedTier
from engine.ranks.ranks import Ranks, end_process
from engine.runners.auto import resolve_device
from engine.sequences.batch import Batch, LayerDone, Runner, SampledToken, StepOnItsWay
from engine.sequences.sequence import TokenScores
from engine.tiers.disk_kv import DiskKv
from engine.tiers.host_kv import HostTier
from kvtransfer.prefill_side.sending import KvSender
from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import EngineConfig, TransferConfig
from runtime.errors import BatonError, ConfigError, RankLostError
from runtime.security.cluster_key import ClusterKey

LOAD_TIMEOUT_S = 1800.0
MEMORY_TIMEOUT_S = 50.0  # below HANG_LIMIT_S of engine/ranks/ranks.py


class LeadRunner:
    """Implements `Runner` around rank 0's runner. When a step fails on one rank, the other ranks are in the middle of
    that step, and no other step can follow."""

    def __init__(self, inner: Runner, ranks: Ranks) -> None:
        self.num_layers = inner.num_layers
        self.depth = inner.depth
        self._inner = inner
        self._ranks = ranks

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> StepOnItsWay:
        """Raises RankLostError for any failure."""
        with self.together():
            return _LeadStep(self._inner.submit(batch, layer_done), self)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raises RankLostError for any failure."""
        try:
            yield
        except RankLostError:
            raise
        except Exception as error:  # often because another rank has died
            problem = f"failed in a step that the others are in: {type(error).__name__}: {error}"
            raise self._ranks.dead() or RankLostError(0, os.getpid(), problem) from error


@dataclass(frozen=True, slots=True)
class _LeadStep:
    inner: StepOnItsWay
    runner: LeadRunner

    def draw(self) -> None:
        """Raises RankLostError for any failure."""
        with self.runner.together():
            self.inner.draw()

    def tokens(self) -> Run[SampledToken]:
        return self.inner.tokens()

    def scores(self) -> Run[TokenScores]:
        return self.inner.scores()


@dataclass(frozen=True, slots=True)
class TensorParallelModel:
    """Implements `engine.interface.Memory`, for all ranks. `slab` is rank 0's; every rank's slab has as many
    blocks."""

    runner: Runner
    slab: Slab
    own: LoadedModel
    ranks: Ranks
    adopted: list[AdoptedSlab] = field(default_factory=list)  # the result of `other_slabs`

    def sender(self, identity: SlabIdentity, config: TransferConfig, key: ClusterKey | None) -> KvSender:
        return RankedSender(self.own.sender(identity, config, key), identity, config, self.ranks, key)

    def tier(self, own: HostTier) -> RankedTier:
        """The host tiers of all ranks; `own` is rank 0's."""
        return RankedTier(own, self.ranks)

    def disk(self, own: DiskKv) -> RankedDisk:
        """The disk tiers of all ranks, once tier() was asked for; `own` is rank 0's."""
        return RankedDisk(own, self.ranks)

    def other_slabs(self) -> list[AdoptedSlab]:
        """The other ranks' slabs, mapped here; asked for once. Raises RankLostError, or UnavailableError when this
        device cannot reach another rank's memory."""
        assert not self.adopted

        def adopt(rank: int, fd: int) -> None:
            self.adopted.append(AdoptedSlab(self.slab.layout, self.slab.driver, fd, f"rank {rank}"))

        try:
            self._exported(adopt)
        except BaseException:
            while self.adopted:
                self.adopted.pop().close()
            raise
        return self.adopted

    def _exported(self, take: Callable[[int, int], None]) -> None:
        """Calls `take(rank, fd)` for every other rank, with a descriptor of the slab's present memory."""
        self.ranks.tell(ExportSlab())
        for rank in range(1, self.ranks.size):
            fd = self.ranks.exported_slab(rank)
            try:
                take(rank, fd)
            finally:
                os.close(fd)

    @property
    def fingerprint(self) -> str:
        return self.own.memory.fingerprint

    @property
    def asleep(self) -> tuple[str, ...]:
        return self.own.memory.asleep

    def sleep(self, level: int) -> int:
        """Sleeps on all ranks at once and returns the bytes that came free on all of them; see ModelMemory. Raises
        RankLostError."""
        level = self.own.memory.level_with_room(level, self.ranks.size)
        for slab in self.adopted:
            slab.close()  # because a rank's memory comes free only when no other rank maps it
        told = self.ranks.tell(Sleep(level))
        freed = self.own.memory.sleep(level)
        self.ranks.wait_done(told, MEMORY_TIMEOUT_S)
        return freed * self.ranks.size

    def wake(self, tags: tuple[str, ...]) -> None:
        """Raises RankLostError when a rank finds no memory: the rank ends, and this worker with it. Raises ModelError,
        with nothing changed, for weights that were replaced meanwhile; all ranks read the same files."""
        self.own.memory.check(tags)
        told = self.ranks.tell(Wake(tags))
        self.own.memory.wake(tags)
        self.ranks.wait_done(told, MEMORY_TIMEOUT_S)
        if KV_CACHE not in self.asleep and any(slab.suspended for slab in self.adopted):
            self._exported(lambda rank, fd: self.adopted[rank - 1].resume(fd))

    @property
    def problem(self) -> str:
        return self.own.memory.problem

    def update(self, tensors: Tensors) -> None:
        """Updates all ranks, see ModelMemory.update(): each gets every tensor whole and keeps its part. Raises
        RankLostError."""
        try:
            self.own.memory.update(tensors, self._share)
            self.ranks.wait_done(self.ranks.tell(EndUpdate()), MEMORY_TIMEOUT_S)
        except RuntimeError as error:  # of a broadcast, when another rank has died
            raise self.ranks.dead() or error from error

    def opened(self, folder: Path) -> Checkpoint:
        """Returns what ModelMemory.opened() does. Rank 0 checks whole tensors, hence for all ranks."""
        return self.own.memory.opened(folder)

    def read(self, checkpoint: Checkpoint) -> None:
        """Every rank reads its part. Raises RankLostError: a rank that cannot read ends, and this worker with it."""
        told = self.ranks.tell(ReadWeights(str(checkpoint.folder)))
        self.own.memory.read(checkpoint)
        self.ranks.wait_done(told, MEMORY_TIMEOUT_S)

    def _share(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.detach().to(self.slab.flat.device, self.own.dtype).contiguous()
        self.ranks.tell(TakeTensor(name, tuple(whole.shape)))
        assert self.ranks.collective is not None
        self.ranks.collective.broadcast(whole.view(torch.uint8))
        return whole

    def close(self) -> None:
        """Ends the ranks, once the engine's thread has ended."""
        self.own.close()
        self.ranks.close()


def load_tensor_parallel(
    files: ModelFiles,
    config: EngineConfig,
    on_lost: Callable[[RankLostError], None] = end_process,
    *,
    random_weights: bool = False,
) -> TensorParallelModel:
    """Loads the model on `config.tensor_parallel` ranks, of which this process is rank 0. Raises ConfigError,
    ModelError, and RankLostError when a rank ends meanwhile and `on_lost` returns."""
    size, device = config.tensor_parallel, resolve_device(config)
    shard_of(files.config, 0, size)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(FIELD, f"{size} ranks need as many GPUs, and {torch.cuda.device_count()} are visible here")
    if device.type == "cuda" and (current := torch.cuda.current_device()):
        raise ConfigError(FIELD, f"the first rank takes the first GPU, and GPU {current} is this thread's: set it to 0")
    ranks = Ranks(size, on_lost)
    try:
        folder = None if random_weights else str(files.folder)
        load = ranks.tell(Load(str(ranks.meeting), folder, files.config, files.eos_token_ids, config))
        ranks.collective = Collective(ranks.meeting, 0, size, device)
        own = load_model(files, config, ranks.collective, random_weights=random_weights)
        ranks.wait_done(load, LOAD_TIMEOUT_S)
    except BaseException as error:
        lost = ranks.dead() if isinstance(error, Exception) and not isinstance(error, BatonError) else None
        ranks.close(timeout_s=0)
        if lost is None:
            raise
        raise lost from error
    return led_by(own, ranks)


def led_by(own: LoadedModel, ranks: Ranks) -> TensorParallelModel:
    """The whole model, once the other ranks have loaded their parts. `own`: rank 0's part, no longer used alone."""
    ranks.loaded()
    own.runner.tell = ranks.tell
    return TensorParallelModel(LeadRunner(own.runner, ranks), own.slab, own, ranks)
