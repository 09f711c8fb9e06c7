"""The driver of a device."""

import torch

from runtime.device.driver import MemoryDriver
from runtime.device.host_memory import HostMemory


def memory_of(device: torch.device) -> MemoryDriver:
    if device.type == "cpu":
        return HostMemory()
    from runtime.device.cuda_memory import CudaMemory  # here: cuda-bindings is installed only where there is a GPU

    return CudaMemory(device)
