"""The server of a worker's streams: proof of the cluster key, hello and hello back, then the handler of the stream."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import structlog

from baton_proto.worker import MAJOR, Hello, decode_greeting
from runtime.address import format_address
from runtime.errors import ProtocolError
from runtime.security.cluster_key import ClusterKey
from runtime.security.handshake import STREAM_PLANE, listening
from runtime.streams.message_stream import MessageStream, accept_streams

HELLO_TIMEOUT_S = 5.0

log = structlog.get_logger()

Handler = Callable[[MessageStream, str], Awaitable[None]]
"""Gets a stream after the hellos, and the sender's name; returns when the stream has ended."""


class StreamServer:
    """`handlers`: by what a stream is for. `key`: what peers have to prove. Event loop only."""

    def __init__(self, ours: Hello, handlers: Mapping[str, Handler], key: ClusterKey | None = None) -> None:
        self._key = key
        self._ours = ours
        self._handlers = handlers
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], MessageStream] = {}

    async def start(self, host: str, port: int = 0) -> str:
        """Returns HOST:PORT; port 0 takes a free one. Raises OSError."""
        tls = None if self._key is None else self._key.tls
        self._server = await accept_streams(host, port, self._accepted, tls)
        return format_address(host, self._server.sockets[0].getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Takes no new streams; open ones have `grace_s` to end."""
        if self._server is not None:
            self._server.close()
        if self._open:
            await asyncio.wait(list(self._open), timeout=grace_s)
        for stream in self._open.values():
            stream.abort("the worker leaves")
        if self._open:
            await asyncio.wait(list(self._open))

    def _accepted(self, stream: MessageStream) -> None:
        task = asyncio.create_task(self._serve(stream))
        self._open[task] = stream
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """Whatever ended the handler: a stream that nobody reads is not left open."""
        stream = self._open.pop(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("the handler of a stream failed", peer=stream.peer, exc_info=error)
        stream.abort("nobody serves the stream any more")

    async def _serve(self, stream: MessageStream) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                if not await self._admitted(stream):
                    return
                hello = await stream.receive(decode_greeting)
        except TimeoutError:
            stream.abort(f"no hello within {HELLO_TIMEOUT_S:.0f} s")
        except (ProtocolError, ConnectionError) as error:
            stream.refuse(f"the first message of a stream must be a hello: {error}")
        else:
            if problem := self._problem(hello):
                log.warning("stream refused", peer=hello.sender, reason=problem)
                stream.refuse(problem)
            else:
                stream.peer = hello.sender
                stream.note_process(hello.process)
                stream.send(self._ours)
                await self._handlers[hello.stream](stream, hello.sender)
        await stream.ended()

    async def _admitted(self, stream: MessageStream) -> bool:
        """Whether the peer has the cluster key. A peer without the key learns nothing of this worker."""
        if self._key is None:
            return True
        try:
            await stream.shake_hands(listening(self._key, STREAM_PLANE, stream.peer))
        except (ProtocolError, ConnectionError) as error:
            log.warning("stranger turned away", reason=str(error))
            stream.abort(str(error))
            return False
        return True

    def _problem(self, hello: Hello) -> str | None:
        """Why the stream cannot be served; None when it can. A peer that expects another incarnation is refused:
        what it knows, cached blocks above all, ended with that incarnation."""
        if hello.version != MAJOR:
            return f"version {hello.version} of the worker protocol is not understood here; this build speaks {MAJOR}"
        if hello.incarnation not in (0, self._ours.incarnation):
            return f"{self._ours.sender} runs as incarnation {self._ours.incarnation}, not {hello.incarnation}"
        if hello.stream not in self._handlers:
            return f"{self._ours.sender} takes no {hello.stream!r} streams"
        return None
