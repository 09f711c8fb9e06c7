"""A device of streams and copy engines in this process: what is enqueued is done as late, and in as odd an order over
the streams, as the events allow."""

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from runtime.device.host_memory import HostMemory


class FakeStream:
    def __init__(self, gpu: "FakeGpu") -> None:
        self.cuda_stream = len(gpu.streams)
        self.work: deque[Callable[[], bool]] = deque()  # each says whether it is done
        gpu.streams.append(self)

    def wait_event(self, event: "FakeEvent") -> None:
        assert event.is_recorded
        self.work.append(lambda: event.is_done)


class FakeEvent:
    def __init__(self, gpu: "FakeGpu") -> None:
        self.is_recorded = self.is_done = False
        self._gpu = gpu

    def record(self, stream: FakeStream) -> None:
        self.is_recorded = True
        stream.work.append(self._reached)

    def _reached(self) -> bool:
        self.is_done = True
        return True

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        assert self.is_recorded
        self._gpu.work_until(lambda: self.is_done)

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1.0


class FakeGpu(HostMemory):
    """A driver whose copies are enqueued when there is a permit for the call, as by a slow one."""

    device = torch.device("cpu")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        super().__init__()
        self.streams: list[FakeStream] = []
        self.permits = threading.Semaphore(1000)
        self.num_calls = 0
        self.problem: Exception | None = None  # what the next calls raise
        self._dice = random.Random(seed)
        self._works = threading.RLock()
        self.current = FakeStream(self)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)

    def enter(self) -> None: ...

    def pin(self, address: int, nbytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...

    def copy(self, destinations: NDArray[np.uint64], sources: NDArray[np.uint64], nbytes: int, stream: int) -> None:
        self.permits.acquire()
        if self.problem:
            raise self.problem
        self.num_calls += 1
        for to, of in zip(destinations.tolist(), sources.tolist(), strict=True):

            def copied(to: int = to, of: int = of) -> bool:
                ctypes.memmove(to, of, nbytes)
                return True

            self.streams[stream].work.append(copied)

    def work(self, count: int) -> bool:
        """Does some of what may be done. Whether there was any."""
        with self._works:
            for _ in range(count):
                streams = [stream for stream in self.streams if stream.work]
                self._dice.shuffle(streams)
                if not any(stream.work[0]() and self._pop(stream) for stream in streams):
                    return False
        return True

    def _pop(self, stream: FakeStream) -> bool:
        stream.work.popleft()
        return True

    def work_until(self, is_over: Callable[[], Any]) -> None:
        while not is_over():
            assert self.work(1) or is_over(), "nothing goes on"
