"""Which GPUs of this host each worker gets. Where there is no NVIDIA driver, workers are told nothing."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

from runtime.errors import ConfigError

DRIVER_GPUS: Final = Path("/proc/driver/nvidia/gpus")  # one entry each
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class GpuPlaces:
    """Of models that sleep one is awake on a GPU at a time: they share it with workers that never sleep, and not with
    each other. `model` is the name of such a model; empty: the worker never sleeps."""

    def __init__(self, gpus: list[str], workers: Sequence[int], sleepers: Sequence[tuple[int, str]] = ()) -> None:
        """`gpus`: names as CUDA_VISIBLE_DEVICES takes them. `workers`: how many GPUs each worker takes, in the order of
        their start. `sleepers`: likewise with their models, which start after them. Raises ConfigError when there are
        GPUs, but fewer than one worker takes."""
        wanted = [*((size, "") for size in workers), *sleepers]
        most = max((size for size, _ in wanted), default=1)
        if gpus and len(gpus) < most:
            raise ConfigError("engine.tensor_parallel", f"a worker takes {most} GPUs, and {len(gpus)} are here")
        self._gpus = gpus
        self._taken = [Counter[str]() for _ in gpus]  # workers on each GPU, by model
        for size, model in wanted:
            self._take(size, model)
        self.share = max((_awake(taken) for taken in self._taken), default=1)  # most workers awake on one GPU
        self._taken = [Counter() for _ in gpus]

    def next(self, size: int = 1, model: str = "") -> dict[str, str]:
        """The environment of the next worker: the first `size` neighbouring GPUs with the fewest workers."""
        place = [self._gpus[index] for index in self._take(size, model)]
        return {VISIBLE: ",".join(place)} if place else {}

    def has_room(self, size: int) -> bool:
        """Whether one more worker shares its GPUs with no more workers than `share` allows. True where there are no
        GPUs, and for what takes none."""
        return not self._gpus or not size or self._least(size, "")[1][0] <= self.share

    def give_back(self, environment: Mapping[str, str], model: str = "") -> None:
        """Frees what `next` gave to a worker that has ended."""
        for gpu in environment.get(VISIBLE, "").split(","):
            if gpu:
                self._taken[self._gpus.index(gpu)][model] -= 1

    def _take(self, size: int, model: str) -> range:
        if not self._gpus:
            return range(0)
        place, _ = self._least(size, model)
        for index in place:
            self._taken[index][model] += 1
        return place

    def _least(self, size: int, model: str) -> tuple[range, tuple[int, int]]:
        """The neighbouring GPUs that have the fewest workers with one more, and how many are awake there at once and
        are there."""
        places = [range(start, start + size) for start in range(0, len(self._gpus) - size + 1, size)]
        with_one = ((place, [self._taken[index] + Counter({model: 1}) for index in place]) for place in places)
        counted = ((place, max((_awake(taken), taken.total()) for taken in all_taken)) for place, all_taken in with_one)
        return min(counted, key=itemgetter(1))


def _awake(taken: Counter[str]) -> int:
    return taken[""] + max((count for model, count in taken.items() if model), default=0)


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER_GPUS) -> list[str]:
    """The GPUs of this process: those that CUDA_VISIBLE_DEVICES names, or else all that the driver has."""
    named = environment.get(VISIBLE)
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    return [str(number) for number in range(len(list(driver.iterdir())))] if driver.is_dir() else []
