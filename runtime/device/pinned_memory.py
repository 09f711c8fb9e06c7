"""Host memory that a GPU copies to and from at the speed of the link."""

import ctypes
import mmap
import os
import threading
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.errors import UnavailableError

if TYPE_CHECKING:
    from runtime.device.cuda_memory import CudaMemory

_THREADS = 16  # that touch pages; one alone would take a quarter of a second per GiB


class PinnedMemory:
    """Taken whole when it is made, in huge pages where the kernel has them."""

    def __init__(self, driver: "CudaMemory", nbytes: int) -> None:
        """Raises UnavailableError when there is not that much."""
        self._driver = driver
        try:
            self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UnavailableError(f"no {nbytes} bytes of host memory: {error.strerror}") from error
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.array: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address: int = self.array.ctypes.data
        self._touch(nbytes)
        driver.pin(self.address, nbytes)

    def _touch(self, nbytes: int) -> None:
        count = min(_THREADS, len(os.sched_getaffinity(0)))
        step = -(-nbytes // count)
        threads = [
            threading.Thread(target=ctypes.memset, args=(self.address + begin, 0, min(step, nbytes - begin)))
            for begin in range(0, nbytes, step)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Nobody copies or reads any more."""
        self._driver.unpin(self.address)
        del self.array, self._map  # a view that somebody still has keeps the memory
