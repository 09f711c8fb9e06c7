"""Streams of messages over TCP between the processes of a service: frames of msgpack (length_prefix.py).

Streams carry the messages of each request and each engine step, at about 10 us of CPU a message where gRPC takes 80 to
90 us. gRPC carries the rare calls.

Because a process that hangs, or whose machine has vanished, closes no socket, each end sends something every
PING_INTERVAL_S, an empty frame if there is no message, and gives up a peer that stays silent, unless the peer merely
waits for a core of this machine.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import structlog

from baton_proto.decoding import MAX_TEXT
from baton_proto.version import VersionError, check_major
from baton_proto.worker import Hello, Refused, decode_greeting, encode
from runtime.address import parse_address
from runtime.errors import ProtocolError, UnauthorizedError
from runtime.host import pid_here
from runtime.security.cluster_key import ClusterKey
from runtime.security.handshake import MAX_FRAME_BYTES, STREAM_PLANE, TLS_ERRORS, Handshake, dialing, tls_failure
from runtime.silence import Silence
from runtime.streams.length_prefix import PREFIX_BYTES, body_bytes, framed

if TYPE_CHECKING:
    from runtime.security.internal_tls import InternalTls

PING_INTERVAL_S: Final = 1.0
SILENT_PINGS: Final = 5  # intervals without a byte from the peer, after which it is given up
LINGER_S: Final = 1.0  # how long a peer may take to close its end after ours
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
ENDED: Final = "the peer ended the stream"
_PING = framed(b"")
_TLS_LIMITS: Final[dict[str, Any]] = {"ssl_handshake_timeout": 5.0, "ssl_shutdown_timeout": 1.0}

log = structlog.get_logger()

Decode = Callable[[bytes], Any]


class MessageStream(asyncio.Protocol):
    """One connection. receive() asks for the first messages; after listen() messages are handed over as they come.

    Event loop only. What is sent after the end is dropped. `peer`: a name for error messages.
    """

    def __init__(self, peer: str, accepted: "Callable[[MessageStream], None] | None" = None) -> None:
        self.peer = peer
        self.writable = True  # False while the peer reads more slowly than we write
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._accepted = accepted
        self._ended: asyncio.Future[str] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._read_to = 0  # index into `_unread`
        self._listener: tuple[Decode, Callable[[Any], None]] | None = None
        self._on_writable: Callable[[], None] | None = None
        self._arrived: asyncio.Future[None] | None = None
        self._reason: str | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._silence = _silence_of(None)
        self._quiet = True  # nothing sent since the last tick
        self._stranger = False  # the peer has to prove itself first
        self._leaving = False  # nothing is sent or heard any more

    # --- messages -----------------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct) -> None:
        """Sends at once and never waits: see `writable`."""
        self._send_frame(encode(message))

    async def receive(self, decode: Decode) -> Any:
        """The next message, before listen(). Raises ProtocolError when it cannot be decoded, ConnectionError when the
        stream has ended."""
        return self._decoded(decode, await self._frame())

    async def shake_hands(self, handshake: Handshake) -> None:
        """Carries out a handshake before the first message. Raises ProtocolError when the peer does not prove itself,
        ConnectionError when the stream ends before that."""
        self._stranger = True
        out = next(handshake)
        while True:
            self._send_frame(out)
            try:
                out = handshake.send(await self._frame())
            except StopIteration as done:
                self._send_frame(done.value)
                self._stranger = False
                return

    def note_process(self, name: str) -> None:
        """The peer is the process of this name, or says none: it may be silent for longer while it waits for a core."""
        self._silence = _silence_of(pid_here(name))

    def listen(
        self, decode: Decode, on_message: Callable[[Any], None], on_writable: Callable[[], None] | None = None
    ) -> None:
        """Hands over all further messages. An exception of `on_message`, or a message that cannot be decoded, ends the
        stream, and the peer is told why. `on_writable` is called when `writable` becomes True again."""
        self._listener, self._on_writable = (decode, on_message), on_writable
        self._hand_over()

    async def ended(self) -> str:
        """Waits for the end and returns its reason."""
        return await asyncio.shield(self._ended)

    def close(self) -> None:
        """Ends the stream after what was sent has left. What the peer still says is dropped.

        We end our direction first and close when the peer has closed, at most LINGER_S later. Because a socket that is
        closed with unread bytes resets the connection, a ping that crosses the end would look like a crash to the peer.
        """
        if self._transport is None or self._leaving or self._transport.is_closing():
            return
        self._leaving = True
        if not self._transport.can_write_eof():  # TLS has an exchange of its own for the end
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the connection was lost, and asyncio has not noticed yet
            self._transport.close()
        else:
            self._loop.call_later(LINGER_S, self._transport.close)

    def refuse(self, reason: str) -> None:
        """Tells the peer the reason and ends the stream."""
        if self._reason is None:
            self._reason = reason
            self.send(Refused(reason[:MAX_TEXT]))
            self.close()

    def abort(self, reason: str) -> None:
        """Ends the stream at once; what has not left is lost."""
        if self._reason is None:
            self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ticker = self._loop.call_later(PING_INTERVAL_S, self._tick)
        if self._accepted is not None:
            self._accepted(self)

    def data_received(self, data: bytes) -> None:
        self._silence.heard()
        if self._leaving:
            return
        self._unread += data
        if self._listener is not None:
            self._hand_over()
        elif self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self._on_writable is not None:
            self._on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._ended.set_result(self._reason or (str(error) if error else ENDED))
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _send_frame(self, data: bytes) -> None:
        if data:
            self._write(framed(data))

    async def _frame(self) -> bytes:
        """Waits for the next frame. Raises ConnectionError when the stream has ended."""
        while (message := self._next()) is None:
            if self._ended.done():
                raise ConnectionError(self._ended.result())
            self._arrived = self._loop.create_future()
            await self._arrived
        return message

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._leaving and not self._transport.is_closing():
            self._quiet = False
            self._transport.write(data)

    def _hand_over(self) -> None:
        assert self._listener is not None
        decode, on_message = self._listener
        try:
            while (message := self._next()) is not None and self._reason is None:
                on_message(self._decoded(decode, message))
        except ProtocolError as error:
            self.refuse(error.problem)
        except Exception as error:
            log.exception("a message could not be dealt with", peer=self.peer)
            self.refuse(f"could not deal with a message: {error!r}")

    def _next(self) -> bytes | None:
        """The next whole message; None when it has not arrived. Raises ProtocolError when it is too long."""
        unread, start = self._unread, self._read_to
        limit = MAX_FRAME_BYTES if self._stranger else MAX_MESSAGE_BYTES
        while len(unread) - start >= PREFIX_BYTES:
            begin = start + PREFIX_BYTES
            end = begin + body_bytes(unread, limit, self.peer, start)
            if end > len(unread):
                break
            start = end
            if end > begin:
                self._read_to = end
                return bytes(memoryview(unread)[begin:end])
        del unread[:start]
        self._read_to = 0
        return None

    def _decoded(self, decode: Decode, message: bytes) -> Any:
        try:
            decoded = decode(message)
        except msgspec.DecodeError as error:
            raise ProtocolError(self.peer, f"sent a message that cannot be decoded: {error}") from error
        if isinstance(decoded, Refused):
            self._reason = decoded.reason  # nothing more comes
            self.close()
            raise ProtocolError(self.peer, decoded.reason)
        return decoded

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(PING_INTERVAL_S, self._tick)
        if self._silence.look():
            self.abort(f"silent for {SILENT_PINGS * PING_INTERVAL_S:.0f} s")
        elif self._quiet and not self._stranger:
            self._write(_PING)
        self._quiet = True


def _silence_of(pid: int | None) -> Silence:
    return Silence(PING_INTERVAL_S, SILENT_PINGS * PING_INTERVAL_S, pid)


async def open_stream(
    address: str, peer: str, ours: Hello, timeout_s: float, key: ClusterKey | None = None
) -> tuple[MessageStream, Hello]:
    """Connects to HOST:PORT, lets both ends prove that they have `key`, and exchanges hellos. The caller ends the
    stream. Raises TimeoutError, OSError, ProtocolError when the peer refuses or speaks another version, and
    UnauthorizedError when the peer has another key or only one end speaks TLS."""
    stream = None
    try:
        async with asyncio.timeout(timeout_s):
            stream = await dial(address, peer, None if key is None else key.tls)
            if key is not None:
                await prove(stream, key)
            stream.send(ours)
            theirs = await stream.receive(decode_greeting)
        check_major(f"{ours.stream} stream", theirs.version, ours.version)
        stream.note_process(theirs.process)
        return stream, theirs
    except BaseException as error:
        if stream is not None:
            stream.abort("no hello")
        if isinstance(error, VersionError):
            raise ProtocolError(peer, str(error)) from error
        raise


async def prove(stream: MessageStream, key: ClusterKey) -> None:
    """Raises UnauthorizedError when the peer does not have the key, or says that we do not."""
    try:
        await stream.shake_hands(dialing(key, STREAM_PLANE, stream.peer))
    except (ProtocolError, ConnectionError) as error:
        problem = f"its cluster key or its security.internal_tls is not ours ({error})"
        raise UnauthorizedError(stream.peer, problem) from error


async def dial(address: str, peer: str, tls: "InternalTls | None" = None) -> MessageStream:
    """Connects to HOST:PORT. Raises OSError, ProtocolError when `address` is none, and UnauthorizedError when TLS with
    the peer does not come about."""
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise ProtocolError(peer, str(error)) from error
    secured = {} if tls is None else {"ssl": tls.client(), "server_hostname": tls.name, **_TLS_LIMITS}
    try:
        _, stream = await asyncio.get_running_loop().create_connection(
            lambda: MessageStream(peer), host, port, **secured
        )
    except TLS_ERRORS as error:
        if tls is None:
            raise
        raise tls_failure(peer, error) from error
    return stream


async def accept_streams(
    host: str, port: int, accepted: Callable[[MessageStream], None], tls: "InternalTls | None" = None
) -> asyncio.Server:
    """`accepted` gets every new connection, with `tls` those whose peer has shown a certificate. Raises OSError when
    the address cannot be used."""
    loop = asyncio.get_running_loop()
    secured = {} if tls is None else {"ssl": tls.listener(), **_TLS_LIMITS}
    return await loop.create_server(lambda: MessageStream("a new connection", accepted), host, port, **secured)
