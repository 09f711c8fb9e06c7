"""The metrics plane: workers report their load once a second over core NATS; routers and planner keep the latest."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from baton_proto.discovery import LoadReport, decode_load_report
from runtime.nats.client import NatsClient
from runtime.nats.subjects import load_subject

_encoder = msgspec.msgpack.Encoder()


async def publish_load(nats: NatsClient, report: LoadReport) -> None:
    """Delivered at most once; dropped while NATS is away."""
    await nats.publish(load_subject(nats.namespace, report.worker_id), _encoder.encode(report))


class LoadBoard:
    """The latest report of every worker. A worker that is gone stays until `discard`."""

    def __init__(self, nats: NatsClient) -> None:
        self._nats = nats
        self._reports: dict[str, LoadReport] = {}
        self._callbacks: list[Callable[[LoadReport], None]] = []

    @property
    def reports(self) -> Mapping[str, LoadReport]:
        """The latest reports by worker id; a live view."""
        return MappingProxyType(self._reports)

    def on_report(self, callback: Callable[[LoadReport], None]) -> None:
        """`callback` gets every report, on the event loop. It must not block."""
        self._callbacks.append(callback)

    async def start(self) -> None:
        await self._nats.hear(load_subject(self._nats.namespace), "load report", decode_load_report, self._receive)

    def discard(self, worker_id: str) -> None:
        self._reports.pop(worker_id, None)

    def _receive(self, report: LoadReport) -> None:
        self._reports[report.worker_id] = report
        for callback in self._callbacks:
            callback(report)
