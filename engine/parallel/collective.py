"""What the ranks of a tensor-parallel worker compute together. A worker of one rank has no Collective.

The seam for faster ways: models and runners know this class's methods alone. What NCCL does can be captured in CUDA
graphs; gloo does the same on a CPU, for tests. The ranks meet in a file that only they know, so no port is taken and
several workers share a host.
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
_TIMEOUT = timedelta(minutes=30)  # who waits for a dead rank is ended from outside, see engine/ranks/ranks.py


def own_shard(model: ModelConfig, collective: "Collective | None") -> Shard:
    """What this rank holds of the model. Raises ConfigError."""
    return shard_of(model, 0, 1) if collective is None else shard_of(model, collective.rank, collective.size)


class Collective:
    """Every rank calls the same methods in the same order, on tensors of the same shapes."""

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
        """`part`, which becomes the sum of all ranks', the same on all of them."""
        _finish(self._group.allreduce([part], self._sum))
        return part

    def begin_sum(self, part: Tensor) -> "SumOnItsWay":
        """As `sum`, beside what is computed meanwhile. Not for CUDA graphs."""
        return SumOnItsWay(part, self._group.allreduce([part], self._ahead))

    def gather(self, part: Tensor) -> Tensor:
        """[size, *part.shape], by rank."""
        parts = part.new_empty((self.size, *part.shape))
        _finish(self._group._allgather_base(parts.view(-1), part.reshape(-1), self._gather))
        return parts

    def gather_columns(self, part: Tensor, share: int, columns: int) -> Tensor:
        """[rows, columns] of which each rank has `share`, the last one what is left."""
        parts = self.gather(F.pad(part, (0, share - part.shape[1])))
        return parts.movedim(0, 1).flatten(1)[:, :columns]

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's becomes everyone's."""
        _finish(self._group.broadcast([tensor], self._broadcast))

    def smallest(self, value: int) -> int:
        """Of all ranks' values."""
        values = torch.tensor([value], dtype=torch.int64, device=self._device)
        _finish(self._group.allreduce([values], self._least))
        return int(values.item())

    def exchange(self, what: str, value: bytes) -> list[bytes]:
        """Everyone's, by rank; each `what` once."""
        self._store.set(f"{what} {self.rank}", value)
        return [self._store.get(f"{what} {rank}") for rank in range(self.size)]

    def close(self) -> None:
        """When nothing is on its way. CUDA graphs in which it was captured have to be gone: NCCL waits for them."""
        if self._device.type == "cuda":  # NCCL's threads must not outlive what they watch
            abort = threading.Thread(target=self._group.abort, name="abort NCCL", daemon=True)
            abort.start()
            abort.join(_ABORT_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class SumOnItsWay:
    part: Tensor
    work: Any

    def parts(self) -> tuple[Tensor, ...]:
        """The sum, for which the current stream waits."""
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
    """NCCL answers with None for what it has put on the current stream."""
    if work is not None:
        work.wait()
