"""Which GPUs of this host each worker gets. Where there is no NVIDIA driver, workers are told nothing."""

import os
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

from runtime.errors import ConfigError

DRIVER_GPUS: Final = Path("/proc/driver/nvidia/gpus")  # one entry each
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class GpuPlaces:
    def __init__(self, gpus: list[str], workers: Sequence[int]) -> None:
        """`gpus`: names as CUDA_VISIBLE_DEVICES takes them. `workers`: how many GPUs each worker takes, in the order of
        their start. Raises ConfigError when there are GPUs, but fewer than one worker takes."""
        if gpus and len(gpus) < max(workers, default=1):
            problem = f"a worker takes {max(workers)} GPUs, and {len(gpus)} are here"
            raise ConfigError("engine.tensor_parallel", problem)
        self._gpus = gpus
        self._taken = [0] * len(gpus)  # workers on each GPU
        for size in workers:
            self._take(size)
        self.share = max(self._taken, default=1)  # most workers on one GPU
        self._taken = [0] * len(gpus)

    def next(self, size: int = 1) -> dict[str, str]:
        """The environment of the next worker: the first `size` neighbouring GPUs with the fewest workers."""
        place = [self._gpus[index] for index in self._take(size)]
        return {VISIBLE: ",".join(place)} if place else {}

    def has_room(self, size: int) -> bool:
        """Whether one more worker shares its GPUs with no more workers than `share` allows. True where there are no
        GPUs, and for what takes none."""
        return not self._gpus or not size or self._least(size)[1] < self.share

    def give_back(self, environment: Mapping[str, str]) -> None:
        """Frees what `next` gave to a worker that has ended."""
        for gpu in environment.get(VISIBLE, "").split(","):
            if gpu:
                self._taken[self._gpus.index(gpu)] -= 1

    def _take(self, size: int) -> range:
        if not self._gpus:
            return range(0)
        place, _ = self._least(size)
        for index in place:
            self._taken[index] += 1
        return place

    def _least(self, size: int) -> tuple[range, int]:
        """The neighbouring GPUs with the fewest workers, and how many those are."""
        places = [range(start, start + size) for start in range(0, len(self._gpus) - size + 1, size)]
        return min(((place, max(self._taken[index] for index in place)) for place in places), key=itemgetter(1))


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER_GPUS) -> list[str]:
    """The GPUs of this process: those that CUDA_VISIBLE_DEVICES names, or else all that the driver has."""
    named = environment.get(VISIBLE)
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    return [str(number) for number in range(len(list(driver.iterdir())))] if driver.is_dir() else []
