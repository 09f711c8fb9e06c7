"""What a device's driver must do so that memory can be unmapped, mapped again where it was, and written by a peer.

A range of addresses is reserved once; physical memory comes and goes under it. Each kind of device has one small class:
HostMemory, CudaMemory. An accelerator with virtual memory of its own (Ascend: aclrtReserveMemAddress,
aclrtMallocPhysical, aclrtMapMem, aclrtMemExportToShareableHandle) would be a third class with these verbs.
"""

from typing import Literal, Protocol

MemoryKind = Literal["host", "cuda"]


class MemoryDriver(Protocol):
    """Handles and addresses are integers. Invariant: a caller gives each one that it got back once."""

    kind: MemoryKind
    granularity: int  # bytes; every size is a multiple of it

    def reserve(self, nbytes: int) -> int:
        """Returns addresses without memory behind them. Raises UnavailableError."""

    def free(self, address: int, nbytes: int) -> None:
        """Gives reserved addresses back, when nothing is mapped there."""

    def create(self, nbytes: int) -> int:
        """Returns a handle of new physical memory. Raises UnavailableError when there is not enough."""

    def release(self, handle: int) -> None:
        """Gives a handle back. The memory is freed when no process maps it any more."""

    def map(self, address: int, handle: int, nbytes: int) -> None:
        """Puts the memory behind reserved addresses, for this device to read and write."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes the memory away: whatever touches the addresses from now on fails."""

    def clear(self, address: int, nbytes: int) -> None:
        """Zeroes what is mapped, after all work that was enqueued before."""

    def export(self, handle: int) -> int:
        """Returns a file descriptor, the caller's own, by which another process can adopt the memory."""

    def adopt(self, fd: int, nbytes: int, peer: str) -> int:
        """Returns a handle of another process's memory; the descriptor stays the caller's. Raises ProtocolError when it
        is no memory of `nbytes`, UnavailableError when this device cannot reach it."""
