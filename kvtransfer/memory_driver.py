"""What a device's driver must do so that memory can be unmapped, mapped again where it was, and written by a peer.

One small class per kind of device: HostMemory here, CudaMemory in cuda_memory.py. An accelerator with virtual memory
of its own (Ascend: aclrtReserveMemAddress, aclrtMallocPhysical, aclrtMapMem, aclrtMemExportToShareableHandle) is a
third class with these verbs, and nothing else changes. Used by memory_range.py alone.

Addresses and physical memory are apart: a range of addresses is reserved once, physical memory comes and goes under it.
"""

import ctypes
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, Literal, Protocol

from baton.errors import ProtocolError, UnavailableError

if TYPE_CHECKING:
    import torch

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


class HostMemory:
    """Anonymous files of this host, mapped. Pages are zero, and are taken when they are first touched."""

    kind: MemoryKind = "host"
    granularity = mmap.PAGESIZE

    def reserve(self, nbytes: int) -> int:
        address = _libc.mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
        if address in (None, _MAP_FAILED):
            raise UnavailableError(f"no room for {nbytes} bytes of addresses: {os.strerror(ctypes.get_errno())}")
        return int(address)

    def free(self, address: int, nbytes: int) -> None:
        _check(_libc.munmap(address, nbytes))

    def create(self, nbytes: int) -> int:
        fd = os.memfd_create("baton-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # A peer that maps it may rely on its size: touching a page behind the end would kill the peer.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def release(self, handle: int) -> None:
        os.close(handle)

    def map(self, address: int, handle: int, nbytes: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, handle, 0) != address:
            raise UnavailableError(f"{nbytes} bytes cannot be mapped: {os.strerror(ctypes.get_errno())}")
        # A child of ours must not outlive us with leave to write a peer's memory.
        _check(_libc.madvise(address, nbytes, mmap.MADV_DONTFORK))

    def unmap(self, address: int, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        if _libc.mmap(address, nbytes, 0, flags, -1, 0) != address:
            raise OSError(ctypes.get_errno(), "mmap over a mapping")

    def clear(self, address: int, nbytes: int) -> None:
        """Nothing to do: its pages are new."""

    def export(self, handle: int) -> int:
        return os.dup(handle)

    def adopt(self, fd: int, nbytes: int, peer: str) -> int:
        size = os.fstat(fd).st_size
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError:
            sealed = 0
        if size != nbytes or not sealed:
            problem = f"sent memory of {size} bytes, sealed: {bool(sealed)}; expected {nbytes}, sealed: True"
            raise ProtocolError(peer, problem)
        return os.dup(fd)


_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # the same on all of Linux's common architectures
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _check(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def memory_of(device: "torch.device") -> MemoryDriver:
    if device.type == "cpu":
        return HostMemory()
    from kvtransfer.cuda_memory import CudaMemory  # here, because cuda-bindings is installed only where there is a GPU

    return CudaMemory(device)
