"""GPU memory through CUDA's virtual memory management: cuMemCreate and its relatives.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html. Memory can be exported as a file descriptor. A
process that adopts it maps it for its own device, and reaches the owner's device over NVLink or PCIe.
"""

from typing import Any

import torch
from cuda.bindings import driver as cuda

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

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Calls in torch's context, which a new thread does not have yet. Raises UnavailableError."""
        _checked(cuda.cuCtxSetCurrent(self._context))
        return _checked(function(*arguments))


_FILE_DESCRIPTOR = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value that a driver call returned. Raises UnavailableError when the call failed."""
    status, *values = answer
    if status != cuda.CUresult.CUDA_SUCCESS:
        _, name = cuda.cuGetErrorName(status)
        _, text = cuda.cuGetErrorString(status)
        raise UnavailableError(f"CUDA: {name.decode()}: {text.decode()}")
    return values[0] if values else None
