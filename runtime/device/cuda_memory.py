"""GPU memory through CUDA's virtual memory management: cuMemCreate and its relatives.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html. Memory can be exported as a file descriptor. A
process that adopts it maps it for its own device, and reaches the owner's device over NVLink or PCIe.
"""

import ctypes
import functools
from typing import Any, ClassVar

import numpy as np
import torch
from cuda.bindings import driver as cuda
from numpy.typing import NDArray

from runtime.device.driver import MemoryKind
from runtime.errors import UnavailableError


class CudaMemory:
    """Implements `runtime.device.driver.MemoryDriver` on one device. Any thread may call it."""

    kind: MemoryKind = "cuda"

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._context = _checked(cuda.cuDevicePrimaryCtxRetain(_checked(cuda.cuDeviceGet(index))))  # torch's own
        self._location = cuda.CUmemLocation()
        self._location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = index
        self._wanted = cuda.CUmemAllocationProp()
        self._wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._wanted.location = self._location
        self._wanted.requestedHandleTypes = _FILE_DESCRIPTOR
        self._access = cuda.CUmemAccessDesc()
        self._access.location = self._location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(_checked(cuda.cuMemGetAllocationGranularity(self._wanted, minimum)))

    def reserve(self, nbytes: int) -> int:
        return int(self._call(cuda.cuMemAddressReserve, nbytes, self.granularity, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        self._call(cuda.cuMemAddressFree, address, nbytes)

    def create(self, nbytes: int) -> int:
        return int(self._call(cuda.cuMemCreate, nbytes, self._wanted, 0))

    def release(self, handle: int) -> None:
        self._call(cuda.cuMemRelease, handle)

    def map(self, address: int, handle: int, nbytes: int) -> None:
        self._call(cuda.cuMemMap, address, nbytes, 0, handle, 0)
        try:
            self._call(cuda.cuMemSetAccess, address, nbytes, [self._access], 1)
        except UnavailableError:
            self._call(cuda.cuMemUnmap, address, nbytes)
            raise

    def unmap(self, address: int, nbytes: int) -> None:
        self._call(cuda.cuCtxSynchronize)  # kernels that use the memory end first
        self._call(cuda.cuMemUnmap, address, nbytes)

    def clear(self, address: int, nbytes: int) -> None:
        self._call(cuda.cuMemsetD8, address, 0, nbytes)
        self._call(cuda.cuCtxSynchronize)

    def export(self, handle: int) -> int:
        return int(self._call(cuda.cuMemExportToShareableHandle, handle, _FILE_DESCRIPTOR, 0))

    def adopt(self, fd: int, nbytes: int, peer: str) -> int:
        return int(self._call(cuda.cuMemImportFromShareableHandle, fd, _FILE_DESCRIPTOR))

    def pin(self, address: int, nbytes: int) -> None:
        """Lets the device's copy engines reach this host's memory, which has been touched. Raises UnavailableError."""
        flags = cuda.CU_MEMHOSTREGISTER_PORTABLE
        self._call(cuda.cuMemHostRegister, address, nbytes, flags)

    def unpin(self, address: int) -> None:
        """Ends pin(), after the last copy."""
        self._call(cuda.cuCtxSynchronize)
        self._call(cuda.cuMemHostUnregister, address)

    def enter(self) -> None:
        """Makes the device this thread's. A new thread that waits for an event of another device than the first would
        take memory of the first one, for a context there."""
        _checked(cuda.cuCtxSetCurrent(self._context))

    def copy(self, destinations: NDArray[np.uint64], sources: NDArray[np.uint64], nbytes: int, stream: int) -> None:
        """Enqueues copies of `nbytes` each, between addresses of the device and of pinned memory. One call of the
        driver for all of them: a call for each would take the host longer than the copy."""
        count = len(sources)
        sizes, first = np.full(count, nbytes, np.uint64), np.zeros(1, np.uint64)
        self.enter()
        failed = ctypes.c_size_t()
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (destinations, sources, sizes)]
        alike = (ctypes.byref(_IN_STREAM_ORDER), first.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(1))
        status = _batch()(*pointers, ctypes.c_size_t(count), *alike, ctypes.byref(failed), ctypes.c_void_p(stream))
        _checked((cuda.CUresult(status),))

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Calls in torch's context, which a new thread does not have yet. Raises UnavailableError."""
        self.enter()
        return _checked(function(*arguments))


class _Place(ctypes.Structure):
    _fields_: ClassVar = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: when sources are read, hints of where both ends lie, flags."""

    _fields_: ClassVar = [
        ("order", ctypes.c_int),
        ("source", _Place),
        ("destination", _Place),
        ("flags", ctypes.c_uint),
    ]


_IN_STREAM_ORDER = _CopyAttributes(1)


@functools.cache
def _batch() -> Any:
    """cuMemcpyBatchAsync. Not through cuda-bindings, which wants a Python object for each address. Raises
    UnavailableError."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    except AttributeError as error:
        raise UnavailableError("this NVIDIA driver cannot copy in batches: it needs release 570 or newer") from error


_FILE_DESCRIPTOR = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value that a driver call returned. Raises UnavailableError when the call failed."""
    status, *values = answer
    if status != cuda.CUresult.CUDA_SUCCESS:
        _, name = cuda.cuGetErrorName(status)
        _, text = cuda.cuGetErrorString(status)
        raise UnavailableError(f"CUDA: {name.decode()}: {text.decode()}")
    return values[0] if values else None
