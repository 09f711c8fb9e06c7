"""A second stream, on which part of a layer's work shares the GPU with the rest of it."""

from collections.abc import Callable
from functools import partial

import torch

from runtime.device.quick_launch import noted


class SideStream:
    """Invariant: what runs on the side allocates no memory, so the current stream, which waits for it, may free or
    overwrite all that it reads. Two events serve all layers, because a wait is for an event's last record before it."""

    def __init__(self, device: torch.device, priority: int) -> None:
        """priority: the lower, the sooner its kernels get room; 0, the current stream's, is the highest number."""
        self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self._forked, self._ended = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]

    def both(self, here: Callable[[], None], aside: Callable[[], None]) -> None:
        """Launches `here` on the current stream, then `aside` on this one: both after the work that the current stream
        has so far, and before its later work. NotedLaunches repeats it."""
        current = torch.cuda.current_stream()
        noted(partial(self._fork, current))
        try:
            here()
            with torch.cuda.stream(self._stream):
                aside()
        finally:
            noted(partial(self._join, current))

    def _fork(self, current: torch.cuda.Stream) -> None:
        self._forked.record(current)
        self._stream.wait_event(self._forked)

    def _join(self, current: torch.cuda.Stream) -> None:
        self._ended.record(self._stream)
        current.wait_event(self._ended)
