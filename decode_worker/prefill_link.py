"""The stream to one prefill worker: prompts and cancels go out, refusals come in.

A link stays open between requests; after it broke, the next request makes a new one.
"""

import asyncio
from collections.abc import Callable

import structlog

from baton_proto.decoding import decoder
from baton_proto.worker import (
    MAJOR,
    PREFILL,
    Failure,
    Hello,
    PrefillCancel,
    PrefillFailed,
    PrefillPassed,
    PrefillReport,
    PrefillRequest,
    PrefillTarget,
)
from runtime.end_task import end_tasks
from runtime.errors import ProtocolError, UnauthorizedError
from runtime.host import process_name
from runtime.security.cluster_key import ClusterKey
from runtime.streams.message_stream import MessageStream, open_stream
from worker.requests.request import Request

decode_report = decoder(PrefillReport)

log = structlog.get_logger()


class PrefillLink:
    """Event loop only. `on_failed`: the prefill worker failed one request. `on_passed`: it has computed one whose KV it
    does not ship itself. `on_lost`: it died, refused the stream or
    cannot be reached, and had these requests."""

    def __init__(
        self,
        target: PrefillTarget,
        worker_id: str,
        connect_timeout_s: float,
        key: ClusterKey | None,
        on_failed: Callable[[Request, Failure], None],
        on_passed: Callable[[Request, PrefillPassed], None],
        on_lost: Callable[["PrefillLink", list[Request], str], None],
    ) -> None:
        self._key = key
        self.target = target
        self._worker_id = worker_id
        self._connect_timeout_s = connect_timeout_s
        self._on_failed = on_failed
        self._on_passed = on_passed
        self._on_lost = on_lost
        self._requests: dict[str, Request] = {}
        self._stream: MessageStream | None = None
        self._waiting: list[PrefillRequest | PrefillCancel] = []  # commands that wait for the stream
        self._task = asyncio.create_task(self._run())

    @property
    def is_reached(self) -> bool:
        """Whether the prefill worker has ever had what was sent."""
        return self._stream is not None

    def send(self, request: Request, command: PrefillRequest) -> None:
        self._requests[request.key] = request
        self._send(command)

    def cancel(self, request: Request) -> None:
        if self._requests.pop(request.key, None) is not None:
            self._send(PrefillCancel(request.key))

    def forget(self, request: Request) -> None:
        """The request's KV has arrived."""
        self._requests.pop(request.key, None)

    async def close(self) -> None:
        await end_tasks(self._task)

    def _send(self, command: PrefillRequest | PrefillCancel) -> None:
        if self._stream is None:
            self._waiting.append(command)
        else:
            self._stream.send(command)

    async def _run(self) -> None:
        reason = "the link ended"
        try:
            reason = await self._talk()
        except TimeoutError:
            reason = f"no answer within {self._connect_timeout_s:.1f} s"
        except (ProtocolError, UnauthorizedError, OSError) as error:
            reason = str(error)
        finally:
            requests, self._requests = list(self._requests.values()), {}
            log.info("prefill link ended", prefill_worker=self.target.worker_id, reason=reason, requests=len(requests))
            self._on_lost(self, requests, reason)

    async def _talk(self) -> str:
        """Serves the stream from the hellos to its end; returns the reason of the end."""
        target = self.target
        ours = Hello(MAJOR, self._worker_id, target.incarnation, PREFILL, process_name())
        address, timeout_s = target.stream_address, self._connect_timeout_s
        stream, _ = await open_stream(address, target.worker_id, ours, timeout_s, self._key)
        try:
            self._stream = stream
            for command in self._waiting:
                stream.send(command)
            stream.listen(decode_report, self._read)
            return await stream.ended()
        finally:
            stream.abort("the link is closed")

    def _read(self, report: PrefillFailed | PrefillPassed) -> None:
        request = self._requests.pop(report.request_id, None)
        if request is None:
            return
        if isinstance(report, PrefillPassed):
            self._on_passed(request, report)
        else:
            self._on_failed(request, report.failure)
