"""The order of what SideStream enqueues, on streams that only remember. What shares a real GPU is compared in
test_cuda_runner."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.cuda.side_stream import SideStream
from runtime.device.quick_launch import NotedLaunches, QuickLaunch
from tests.runtime.device.stand_ins import Kernel

HERE, ASIDE = 7, 8  # handles of streams


class Streams:
    """Stands for torch.cuda: one thread's streams, and what they were told, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[tuple[int, str, Any]] = []
        self.here, self.events = Stream(self, HERE), 0
        self.current = self.here
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "current_stream", lambda: self.current)
        patch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(self, ASIDE))
        patch.setattr(torch.cuda, "Event", lambda: Event(self))
        patch.setattr(torch.cuda, "stream", self._stream)

    @contextmanager
    def _stream(self, stream: "Stream") -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.here


class Stream:
    def __init__(self, streams: Streams, handle: int) -> None:
        self.streams, self.cuda_stream = streams, handle

    def wait_event(self, event: "Event") -> None:
        self.streams.told.append((self.cuda_stream, "waits", event.number))


class Event:
    def __init__(self, streams: Streams) -> None:
        streams.events += 1
        self.streams, self.number = streams, streams.events

    def record(self, stream: Stream) -> None:
        self.streams.told.append((stream.cuda_stream, "records", self.number))


ORDER = [
    (HERE, "records", 1),
    (ASIDE, "waits", 1),
    (HERE, "launches", "decode"),
    (ASIDE, "launches", "prefill"),
    (ASIDE, "records", 2),
    (HERE, "waits", 2),
]


def launched(streams: Streams, name: str) -> Any:
    """A kernel that is compiled already, and tells when it is launched."""
    kernel = Kernel()
    told = streams.told

    class Telling:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*_: Any, stream: int | None = None) -> None:
                told.append((streams.current.cuda_stream if stream is None else stream, "launches", name))

            return launch

    quick, tensor = QuickLaunch(kernel), torch.zeros(16)
    kernel.compiled = Telling()  # type: ignore[assignment]
    quick[(1,)](tensor, tensor, 1, SIZE=1)
    return lambda: quick[(1,)](tensor, tensor, 1, SIZE=1)


def test_both_come_after_what_was_enqueued_before_and_every_layer_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    side = SideStream(torch.device("cpu"), 0)
    decode, prefill, noted = launched(streams, "decode"), launched(streams, "prefill"), NotedLaunches()
    with noted:
        side.both(decode, prefill)
    assert streams.told == ORDER
    assert noted.again({})
    assert streams.told == ORDER * 2, "each launch has its stream again"
    assert streams.events == 2, "no layer makes events"


def test_the_stream_waits_also_when_the_second_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that the side reads is given away then."""
    streams = Streams(monkeypatch)
    side = SideStream(torch.device("cpu"), 0)
    with pytest.raises(ZeroDivisionError):
        side.both(lambda: None, lambda: 1 / 0)
    assert streams.told[-1] == (HERE, "waits", 2)
