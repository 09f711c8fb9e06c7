"""The stream to one prefill worker: prompts and cancels go out, refusals come in.

Kept open between requests; the next request makes a new one when it broke.
"""

import asyncio
from typing import Any, Protocol

import grpc
import msgspec
import structlog

from baton.errors import ProtocolError
from baton.keepalive import KEEPALIVE
from baton_proto.version import check_major
from baton_proto.worker import (
    MAJOR,
    PREFILL,
    Failure,
    Hello,
    PrefillCancel,
    PrefillCommand,
    PrefillFailed,
    PrefillReport,
    PrefillRequest,
    PrefillTarget,
    decoder,
    encode,
)
from decode_worker.request import Request

CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a new link never inherits the back-off of a dead one
    *KEEPALIVE,
]

log = structlog.get_logger()


class LinkOwner(Protocol):
    def prefill_failed(self, request: Request, failure: Failure) -> None: ...

    def link_lost(self, link: "PrefillLink", requests: list[Request], reason: str) -> None:
        """The prefill worker died, refused the stream or cannot be reached; `requests` are those it had."""
        ...


class PrefillLink:
    """Event loop only."""

    def __init__(self, target: PrefillTarget, worker_id: str, connect_timeout_s: float, owner: LinkOwner) -> None:
        self.target = target
        self._worker_id = worker_id
        self._connect_timeout_s = connect_timeout_s
        self._owner = owner
        self._requests: dict[str, Request] = {}
        self._outgoing: asyncio.Queue[PrefillCommand] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def send(self, request: Request, command: PrefillRequest) -> None:
        self._requests[request.key] = request
        self._outgoing.put_nowait(command)

    def cancel(self, request: Request) -> None:
        if self._requests.pop(request.key, None) is not None:
            self._outgoing.put_nowait(PrefillCancel(request.key))

    def forget(self, request: Request) -> None:
        """Its KV has arrived."""
        self._requests.pop(request.key, None)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        reason = "the link ended"
        try:
            async with grpc.aio.insecure_channel(self.target.rpc_address, options=CHANNEL_OPTIONS) as channel:
                await self._talk(channel)
                reason = "the prefill worker closed the stream"
        except TimeoutError:
            reason = f"no answer within {self._connect_timeout_s:.1f} s"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except (ProtocolError, msgspec.DecodeError) as error:
            reason = str(error)
        finally:
            requests, self._requests = list(self._requests.values()), {}
            log.info("prefill link ended", prefill_worker=self.target.worker_id, reason=reason, requests=len(requests))
            self._owner.link_lost(self, requests, reason)

    async def _talk(self, channel: grpc.aio.Channel) -> None:
        """Returns when the peer ends the stream."""
        stub: Any = channel.stream_stream(
            PREFILL, request_serializer=encode, response_deserializer=decoder(PrefillReport)
        )
        call = stub()
        async with asyncio.timeout(self._connect_timeout_s):
            await call.write(Hello(MAJOR, self._worker_id, self.target.incarnation))
            hello = await call.read()
        if not isinstance(hello, Hello):
            raise ProtocolError(self.target.worker_id, "the first message of a stream must be a hello")
        check_major("prefill stream", hello.version, MAJOR)
        writer = asyncio.create_task(self._write(call))
        try:
            while (report := await call.read()) is not grpc.aio.EOF:
                if isinstance(report, PrefillFailed) and (request := self._requests.pop(report.request_id, None)):
                    self._owner.prefill_failed(request, report.failure)
        finally:
            writer.cancel()
            call.cancel()

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(await self._outgoing.get())
