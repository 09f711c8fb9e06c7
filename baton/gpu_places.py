"""Which GPU of this host each worker gets. Used by the supervisor, which starts them.

Without an opinion of the driver (no NVIDIA GPU here) there are none, and workers are told nothing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

DRIVER_GPUS: Final = Path("/proc/driver/nvidia/gpus")  # one entry each
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class GpuPlaces:
    def __init__(self, gpus: list[str], workers: int) -> None:
        """`gpus`: names as CUDA_VISIBLE_DEVICES takes them. `workers`: how many are to be placed."""
        self._gpus = gpus
        self._taken = 0
        self.share = max(1, -(-workers // len(gpus))) if gpus else 1

    def next(self) -> dict[str, str]:
        """Environment of the next worker: one GPU after the other, then from the first again."""
        if not self._gpus:
            return {}
        gpu = self._gpus[self._taken % len(self._gpus)]
        self._taken += 1
        return {VISIBLE: gpu}


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER_GPUS) -> list[str]:
    """Of this process: what CUDA_VISIBLE_DEVICES names, or else all that the driver has."""
    named = environment.get(VISIBLE)
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    return [str(number) for number in range(len(list(driver.iterdir())))] if driver.is_dir() else []
