"""Which GPUs of this host each worker gets. Used by the supervisor, which starts them.

Without an opinion of the driver (no NVIDIA GPU here) there are none, and workers are told nothing.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from baton.errors import ConfigError

DRIVER_GPUS: Final = Path("/proc/driver/nvidia/gpus")  # one entry each
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class GpuPlaces:
    def __init__(self, gpus: list[str], workers: Sequence[int]) -> None:
        """`gpus`: names as CUDA_VISIBLE_DEVICES takes them. `workers`: how many GPUs each of those takes that are to be
        placed, in this order. Raises ConfigError when there are some, but fewer than one of them takes."""
        if gpus and len(gpus) < max(workers, default=1):
            problem = f"a worker takes {max(workers)} GPUs, and {len(gpus)} are here"
            raise ConfigError("engine.tensor_parallel", problem)
        self._gpus = gpus
        self._next = 0
        places = Counter(index for size in workers for index in self._take(size))
        self._next = 0
        self.share = max(places.values(), default=1)  # of these workers, that have one GPU

    def next(self, size: int = 1) -> dict[str, str]:
        """Environment of the next worker, which takes so many GPUs: those that follow the last one's, or the first."""
        place = [self._gpus[index] for index in self._take(size)]
        return {VISIBLE: ",".join(place)} if place else {}

    def _take(self, size: int) -> range:
        if not self._gpus:
            return range(0)
        start = self._next if self._next + size <= len(self._gpus) else 0
        self._next = start + size
        return range(start, self._next)


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER_GPUS) -> list[str]:
    """Of this process: what CUDA_VISIBLE_DEVICES names, or else all that the driver has."""
    named = environment.get(VISIBLE)
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    return [str(number) for number in range(len(list(driver.iterdir())))] if driver.is_dir() else []
