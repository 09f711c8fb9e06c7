"""The instructions for the two processes of a transfer benchmark, and how these time their work."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.device.driver import MemoryDriver
from runtime.device.drivers import memory_of

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Case:
    """The instructions for both processes."""

    device: Device
    gpu: str  # CUDA_VISIBLE_DEVICES
    rounds: int
    socket_path: str

    def start(self) -> MemoryDriver:
        """Sets CUDA_VISIBLE_DEVICES in the child, before CUDA reads it."""
        if self.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpu
        import torch

        if self.device == "cuda":
            torch.cuda.set_device(0)
        return memory_of(torch.device(self.device))


def gpu_median_s(call: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median seconds on the device, and on the host until the work is enqueued."""
    import torch

    for _ in range(3):
        call()
    device_s, host_s = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # keeps the device busy, so that the host's time is not part of the device's
        start.record()
        begin_s = time.perf_counter()
        call()
        host_s.append(time.perf_counter() - begin_s)
        end.record()
        end.synchronize()
        device_s.append(start.elapsed_time(end) / 1e3)
    return statistics.median(device_s), statistics.median(host_s)


def median_s(call: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[1:])  # without the first one, which touches the pages
