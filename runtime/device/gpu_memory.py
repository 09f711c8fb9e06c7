"""How much memory of a GPU is free, asked of the driver without a CUDA context, which would take some of it."""

import ctypes
from collections.abc import Sequence

LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_gpu_bytes(gpus: Sequence[str]) -> list[int]:
    """Of each GPU, named as CUDA_VISIBLE_DEVICES does; empty when the driver does not tell of all."""
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        found = []
        for gpu in gpus:
            device, memory = ctypes.c_void_p(), _Memory()
            known = (
                nvml.nvmlDeviceGetHandleByIndex_v2(int(gpu), ctypes.byref(device))
                if gpu.isdecimal()
                else nvml.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(device))
            )
            if known or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
                return []
            found.append(memory.free)
        return found
    finally:
        nvml.nvmlShutdown()
