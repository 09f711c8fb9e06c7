"""What a device's driver must do so that memory can be unmapped, mapped again where it was, and written by a peer.

One small class per kind of device: HostMemory, CudaMemory. An accelerator with virtual memory of its own (Ascend:
aclrtReserveMemAddress, aclrtMallocPhysical, aclrtMapMem, aclrtMemExportToShareableHandle) is a third class with these
verbs, and nothing else changes.

Addresses and physical memory are apart: a range of addresses is reserved once, physical memory comes and goes under it.
"""

from typing import Literal, Protocol

MemoryKind = Literal["host", "cuda"]


class MemoryDriver(Protocol):
    """Handles and addresses are integers. Whoever gets one of them gives it back once."""

    kind: MemoryKind
    granularity: int  # bytes, of which every size is a multiple

    def reserve(self, nbytes: int) -> int:
        """Addresses without memory behind them. Raises UnavailableError."""

    def free(self, address: int, nbytes: int) -> None:
        """Gives reserved addresses back; nothing is mapped there."""

    def create(self, nbytes: int) -> int:
        """A handle of new physical memory. Raises UnavailableError when there is not enough."""

    def release(self, handle: int) -> None:
        """The memory goes when nobody maps it any more, here or in another process."""

    def map(self, address: int, handle: int, nbytes: int) -> None:
        """Puts the memory behind reserved addresses, for this device to read and write."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Whoever touches the addresses from now on fails."""

    def clear(self, address: int, nbytes: int) -> None:
        """Zeroes what is mapped, after all that was enqueued before."""

    def export(self, handle: int) -> int:
        """A file descriptor, the caller's own, by which another process gets at the memory."""

    def adopt(self, fd: int, nbytes: int, peer: str) -> int:
        """A handle of another process's memory; the descriptor stays the caller's. Raises ProtocolError when it is not
        what it should be, UnavailableError when this device cannot reach it."""
