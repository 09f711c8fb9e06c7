"""Which GPUs of this host each worker gets. Used by the supervisor, which starts them.

Without an opinion of the driver (no NVIDIA GPU here) there are none, and workers are told nothing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from baton.errors import ConfigError

DRIVER_GPUS: Final = Path("/proc/driver/nvidia/gpus")  # one entry each
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class GpuPlaces:
    def __init__(self, gpus: list[str], workers: int, per_worker: int = 1) -> None:
        """`gpus`: names as CUDA_VISIBLE_DEVICES takes them. `workers`: how many are to be placed, on `per_worker` GPUs
        each. Raises ConfigError when there are some, but fewer than that."""
        if gpus and len(gpus) < per_worker:
            problem = f"a worker takes {per_worker} GPUs, and {len(gpus)} are here"
            raise ConfigError("engine.tensor_parallel", problem)
        starts = range(0, len(gpus) - per_worker + 1, per_worker)
        self._places = [",".join(gpus[start : start + per_worker]) for start in starts]
        self._taken = [0] * len(self._places)  # workers on each
        self.share = max(1, -(-workers // len(self._places))) if self._places else 1

    def next(self) -> dict[str, str]:
        """Environment of the next worker: the first of the places with the fewest workers."""
        if not self._places:
            return {}
        place = min(range(len(self._places)), key=self._taken.__getitem__)
        self._taken[place] += 1
        return {VISIBLE: self._places[place]}

    def give_back(self, environment: Mapping[str, str]) -> None:
        """What `next` gave, when the worker has ended."""
        if environment:
            self._taken[self._places.index(environment[VISIBLE])] -= 1


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER_GPUS) -> list[str]:
    """Of this process: what CUDA_VISIBLE_DEVICES names, or else all that the driver has."""
    named = environment.get(VISIBLE)
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    return [str(number) for number in range(len(list(driver.iterdir())))] if driver.is_dir() else []
