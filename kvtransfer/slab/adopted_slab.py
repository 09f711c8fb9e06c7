"""The slab of another rank of the same decode worker, mapped by rank 0, which runs the one receiver for all ranks.

Rank 0 exports the slab to the prefill workers that write it, and writes it itself when the bytes come over a socket.
"""

import os
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.slab.layout import SlabLayout
from runtime.device.driver import MemoryDriver
from runtime.device.memory_range import PeerRange
from runtime.errors import UnavailableError

if TYPE_CHECKING:
    import torch


class AdoptedSlab:
    """Order of sleep: suspend() here, then in the rank's process; of waking: resume() there, then here."""

    def __init__(self, layout: SlabLayout, driver: MemoryDriver, fd: int, owner: str) -> None:
        """`fd`: the result of `export()` in the rank's process; it stays the caller's. Raises what resume() raises."""
        self.layout = layout
        self.driver = driver
        self._owner = owner
        self._fd: int | None = None
        self.resume(fd)

    @property
    def suspended(self) -> bool:
        return self._fd is None

    @property
    def buffer(self) -> memoryview:
        """The bytes of the slab, like `Slab.buffer`. Raises UnavailableError."""
        if self.driver.kind != "host":
            raise UnavailableError("the KV slab lies in GPU memory, which has no bytes here")
        return np.asarray(self._memory.array).data[: self.layout.nbytes]

    @property
    def flat(self) -> "torch.Tensor":
        """The slab on rank 0's device, like `Slab.flat`."""
        import torch

        array = self._memory.array if self.driver.kind == "cuda" else np.asarray(self._memory.array)
        return torch.as_tensor(array)[: self.layout.nbytes].view(getattr(torch, self.layout.dtype))

    def export(self) -> int:
        """A file descriptor for peers, like `Slab.export`. Raises UnavailableError."""
        if self._fd is None:
            raise UnavailableError(f"the memory of {self._owner} is given back, so nobody can map it")
        return os.dup(self._fd)

    def suspend(self) -> None:
        """Lets go of the rank's memory, which becomes free only when nobody maps it."""
        assert self._fd is not None
        self._memory.close()
        os.close(self._fd)
        self._fd = None

    def resume(self, fd: int) -> None:
        """Maps the rank's present memory. Raises ProtocolError when `fd` is no slab of this layout, or
        UnavailableError."""
        self._memory = PeerRange(self.driver, fd, self.layout.nbytes, self._owner)
        self._fd = os.dup(fd)

    def close(self) -> None:
        """Idempotent."""
        if self._fd is not None:
            self.suspend()
