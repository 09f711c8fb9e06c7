"""Memory that can be given back and taken again at the same addresses: a worker's weights, and its KV slab.

Invariant: all memory that sleep unmaps or that a peer maps is allocated here, on GPU and CPU alike. Because tensors and
captured CUDA graphs hold addresses, they survive; nobody may touch them while the range is unmapped.
"""

import math
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.device.driver import MemoryDriver
from runtime.errors import UnavailableError

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 256  # bytes


class MemoryRange:
    """Memory that is handed out in tensors from front to back; mapped and zeroed when it is made.

    The addresses go back when the range and its last tensor are gone.
    """

    def __init__(self, driver: MemoryDriver, nbytes: int) -> None:
        """Raises UnavailableError when there is not that much memory."""
        self._span = _Span(driver, nbytes)
        self._used = 0
        self.map()

    @property
    def nbytes(self) -> int:
        """Bytes of the device that the range takes, a little more than was asked for."""
        return self._span.nbytes

    @property
    def is_mapped(self) -> bool:
        return self._span.handle is not None

    def tensor(self, shape: tuple[int, ...], dtype: "torch.dtype") -> "torch.Tensor":
        """The next tensor of the range, contiguous and aligned."""
        begin, nbytes = self._used, math.prod(shape) * dtype.itemsize
        assert begin + nbytes <= self.nbytes, "the range was made for what it holds"
        self._used = begin + padded_bytes(nbytes)
        return self.bytes()[begin : begin + nbytes].view(dtype).view(shape)

    def bytes(self) -> "torch.Tensor":
        """The whole range as uint8."""
        import torch  # here, because a mock engine's slab needs no torch

        return torch.as_tensor(self._span if self._span.driver.kind == "cuda" else np.asarray(self._span))

    def buffer(self) -> memoryview:
        """The bytes of a range in host memory."""
        assert self._span.driver.kind == "host"
        return np.asarray(self._span).data

    def map(self) -> None:
        """Takes new, zeroed memory. Raises UnavailableError, and stays unmapped, when there is not enough."""
        assert not self.is_mapped
        self._span.map(self._span.driver.create(self.nbytes))

    def unmap(self) -> None:
        """Gives the memory back. Because a peer that maps it keeps it alive, peers let go first."""
        assert self.is_mapped
        self._span.unmap()

    def export(self) -> int:
        """Returns a descriptor, the caller's own, by which a peer adopts the mapped memory. Raises UnavailableError."""
        if self._span.handle is None:
            raise UnavailableError("the memory is given back, so nobody can map it")
        return self._span.driver.export(self._span.handle)


class PeerRange:
    """Another process's range, mapped here. The addresses go back with its last array."""

    def __init__(self, driver: MemoryDriver, fd: int, nbytes: int, peer: str) -> None:
        """`fd` stays the caller's. `nbytes`: what the peer asked for. Raises ProtocolError or UnavailableError."""
        self._span = _Span(driver, nbytes)
        self._span.map(driver.adopt(fd, self._span.nbytes, peer), clear=False)

    @property
    def array(self) -> Any:
        """The range's bytes, with numpy's or CUDA's array interface."""
        return self._span

    def close(self) -> None:
        """Unmaps the range: whatever here still writes the peer's memory fails."""
        if self._span.handle is not None:
            self._span.unmap()


class _Span:
    """Reserved addresses, and the memory behind them. Because its arrays hold the span, it goes with the last array."""

    def __init__(self, driver: MemoryDriver, nbytes: int) -> None:
        self.driver = driver
        self.nbytes = -(-nbytes // driver.granularity) * driver.granularity
        self.address = driver.reserve(self.nbytes)
        self._handles: list[int] = []  # of the mapped memory: one or none
        # At the end of the process the kernel gives all back, in an order that is right for the driver.
        weakref.finalize(self, _give_back, driver, self.address, self.nbytes, self._handles).atexit = False

    @property
    def handle(self) -> int | None:
        return self._handles[0] if self._handles else None

    def map(self, handle: int, *, clear: bool = True) -> None:
        """Maps a handle, and takes it over."""
        try:
            self.driver.map(self.address, handle, self.nbytes)
        except BaseException:
            self.driver.release(handle)
            raise
        self._handles.append(handle)
        if clear:
            self.driver.clear(self.address, self.nbytes)

    def unmap(self) -> None:
        self.driver.unmap(self.address, self.nbytes)
        self.driver.release(self._handles.pop())

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    __cuda_array_interface__ = __array_interface__  # each kind of memory is read through one of the two


def _give_back(driver: MemoryDriver, address: int, nbytes: int, handles: list[int]) -> None:
    for handle in handles:
        driver.unmap(address, nbytes)
        driver.release(handle)
    driver.free(address, nbytes)


def padded_bytes(nbytes: int) -> int:
    """Bytes of a range that a tensor of `nbytes` takes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
