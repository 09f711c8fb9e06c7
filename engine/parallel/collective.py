"""Sums, gathers and broadcasts over the ranks of a tensor-parallel worker. A worker of one rank has no Collective.

On GPUs NCCL does the work, which CUDA graphs can capture; on a CPU gloo does it, for tests. The ranks meet in a file
that only they know: no port is taken, and several workers share a host.
"""

import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn.functional as F
from torch import Tensor

from engine.model.shard import Shard, shard_of
from runtime.checkpoint.model_config import ModelConfig

_c10d: Any = c10d  # its types are C++
_ABORT_TIMEOUT_S = 2.0
_TIMEOUT = timedelta(minutes=30)  # engine/ranks/ranks.py ends a process that waits for a dead rank


def own_shard(model: ModelConfig, collective: "Collective | None") -> Shard:
    """This rank's part of the model. Raises ConfigError."""
    return shard_of(model, 0, 1) if collective is None else shard_of(model, collective.rank, collective.size)


class Collective:
    """Invariant: every rank calls the same methods in the same order, with tensors of the same shapes."""

    def __init__(self, meeting: Path, rank: int, size: int, device: torch.device) -> None:
        """Waits for all ranks. `meeting`: a path in a private folder of this host."""
        self.rank = rank
        self.size = size
        self._device = device
        self._store: Any = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        self._group = _nccl(self._store, rank, size) if device.type == "cuda" else _gloo(self._store, rank, size)
        self._ahead = _c10d.AllreduceOptions()
        self._sum, self._least = _c10d.AllreduceOptions(), _c10d.AllreduceOptions()
        self._least.reduceOp = _c10d.ReduceOp.MIN
        self._gather, self._broadcast = _c10d.AllgatherOptions(), _c10d.BroadcastOptions()
        for options in (self._sum, self._least, self._gather, self._broadcast):
            options.asyncOp = False  # on the current stream

    def sum(self, part: Tensor) -> Tensor:
        """Replaces `part` by the sum of all ranks' parts, with the same bits on every rank, and returns it."""
        _finish(self._group.allreduce([part], self._sum))
        return part

    def begin_sum(self, part: Tensor) -> "SumOnItsWay":
        """Begins a `sum` that runs beside later work of the current stream. Not for CUDA graphs."""
        return SumOnItsWay(part, self._group.allreduce([part], self._ahead))

    def gather(self, part: Tensor) -> Tensor:
        """All ranks' parts, [size, *part.shape], by rank."""
        parts = part.new_empty((self.size, *part.shape))
        _finish(self._group._allgather_base(parts.view(-1), part.reshape(-1), self._gather))
        return parts

    def gather_columns(self, part: Tensor, share: int, columns: int) -> Tensor:
        """[rows, columns], of which each rank's `part` holds `share` columns, and the last rank's the rest."""
        parts = self.gather(F.pad(part, (0, share - part.shape[1])))
        return parts.movedim(0, 1).flatten(1)[:, :columns]

    def broadcast(self, tensor: Tensor) -> None:
        """Copies rank 0's tensor to the other ranks'."""
        _finish(self._group.broadcast([tensor], self._broadcast))

    def smallest(self, value: int) -> int:
        """The smallest of all ranks' values."""
        values = torch.tensor([value], dtype=torch.int64, device=self._device)
        _finish(self._group.allreduce([values], self._least))
        return int(values.item())

    def exchange(self, what: str, value: bytes) -> list[bytes]:
        """All ranks' values, by rank. Invariant: each name `what` is used once."""
        self._store.set(f"{what} {self.rank}", value)
        return [self._store.get(f"{what} {rank}") for rank in range(self.size)]

    def close(self) -> None:
        """Invariant: nothing is running, and CUDA graphs that captured this object are gone, because NCCL waits for
        them."""
        if self._device.type == "cuda":  # because NCCL's threads must not outlive the work that they watch
            abort = threading.Thread(target=self._group.abort, name="abort NCCL", daemon=True)
            abort.start()
            abort.join(_ABORT_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class SumOnItsWay:
    part: Tensor
    work: Any

    def parts(self) -> tuple[Tensor, ...]:
        """The sum; the current stream waits for it."""
        self.work.wait()
        return (self.part,)


def _gloo(store: Any, rank: int, size: int) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return _c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return _c10d.ProcessGroupNCCL(store, rank, size, options)


def _finish(work: Any) -> None:
    """Waits for gloo; NCCL returns None for work on the current stream."""
    if work is not None:
        work.wait()
