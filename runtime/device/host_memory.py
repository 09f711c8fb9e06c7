"""Memory of this host, as anonymous files."""

import ctypes
import fcntl
import mmap
import os

from runtime.device.driver import MemoryKind
from runtime.errors import ProtocolError, UnavailableError


class HostMemory:
    """Implements `runtime.device.driver.MemoryDriver`. A page is zero, and takes memory when it is first touched."""

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
            # Because touching a page behind the end would kill a peer that maps the file, its size is sealed.
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
        # Invariant: a child process does not inherit the mapping, so it cannot write a peer's memory after our end.
        _check(_libc.madvise(address, nbytes, mmap.MADV_DONTFORK))

    def unmap(self, address: int, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        if _libc.mmap(address, nbytes, 0, flags, -1, 0) != address:
            raise OSError(ctypes.get_errno(), "mmap over a mapping")

    def clear(self, address: int, nbytes: int) -> None:
        """Nothing to do: new pages are zero."""

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
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _check(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
