"""vLLM's ZeroMQ event stream as a sequence of messages without holes, or with Lost in the place of a hole.

A subscriber gets [topic, sequence number (8 bytes, big-endian), payload]. Numbers begin at 0 with every start of the
engine. Missed messages can be asked for at a second socket while the engine remembers them: [empty, first number] is
answered with [empty, topic, number, payload] for each message, and a last one whose number is -1 and whose topic is
empty. Versions before 0.2x answer without the topic.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from runtime.end_task import end_tasks
from runtime.errors import ConfigError, UnavailableError

NUMBER_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
NEVER = 2**63 - 1  # a message's number
QUEUED_MESSAGES = 10_000  # read ahead; more wait in ZeroMQ's own queue

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Message:
    number: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """Earlier messages cannot be relied on any more: some are missing, or another engine speaks now."""

    reason: str


class _Connection:
    """A word of the monitor in the queue: the connection is there, or gone."""

    def __init__(self, up: bool) -> None:
        self.up = up


class VllmStream:
    def __init__(self, endpoint: str, replay_endpoint: str, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._timeout_s = timeout_s
        self._context = zmq.asyncio.Context()
        self._queue: asyncio.Queue[Message | _Connection] = asyncio.Queue(QUEUED_MESSAGES)
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: list[zmq.asyncio.Socket] = []
        self._next: int | None = None  # None: whatever comes
        self._last_heard = -1  # on the subscription, in this connection

    async def open(self) -> None:
        """Returns when vLLM is connected. Raises UnavailableError, or ConfigError for an impossible endpoint."""
        subscription = self._socket(zmq.SUB)
        subscription.set_hwm(0)  # nothing is dropped on our side
        subscription.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = subscription.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._sockets.append(monitor)
        _connect(subscription, self._endpoint, "events")
        self._tasks = [
            asyncio.create_task(self._receive(subscription)),
            asyncio.create_task(self._watch(monitor)),
        ]
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._until_connected()
        except TimeoutError as error:
            raise UnavailableError(f"no vLLM at {self._endpoint} within {self._timeout_s:g} s") from error

    async def messages(self) -> AsyncIterator[Message | Lost]:
        """Never ends. Raises UnavailableError when the replay endpoint does not answer at the beginning."""
        async for item in self._begin():
            yield item
        while True:
            item_or_connection = await self._queue.get()
            if isinstance(item_or_connection, _Connection):
                if not item_or_connection.up:
                    yield Lost("the connection is lost, and when it is back another engine may speak")
                    await self._until_connected()
                    async for item in self._begin_again():
                        yield item
                continue
            async for item in self._in_order(item_or_connection):
                yield item

    async def check_replay(self) -> None:
        """Raises UnavailableError when the replay endpoint does not answer."""
        await self._replay(NEVER)

    async def close(self) -> None:
        await end_tasks(*self._tasks)
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    # --- order --------------------------------------------------------------------------------------------------------

    async def _begin(self) -> AsyncIterator[Message | Lost]:
        """All messages that the engine remembers."""
        self._last_heard = -1
        self._next = None
        remembered = await self._replay(0)
        if remembered and remembered[0].number > 0:
            log.warning("vLLM has forgotten its first messages", first=remembered[0].number)
        self._next = 0
        for message in remembered:
            self._next = message.number + 1
            yield message

    async def _begin_again(self) -> AsyncIterator[Message | Lost]:
        try:
            async for item in self._begin():
                yield item
        except UnavailableError as error:
            log.warning("no replay", error=str(error))

    async def _in_order(self, message: Message) -> AsyncIterator[Message | Lost]:
        if message.number <= self._last_heard:
            yield Lost("the engine has started again")
            async for item in self._begin_again():
                yield item
        self._last_heard = message.number
        if self._next is None:
            if message.number > 0:
                log.warning("joined late: blocks from before are not known", first=message.number)
        elif message.number > self._next:
            async for item in self._fill_gap(self._next, message.number):
                yield item
        if self._next is None or message.number >= self._next:
            self._next = message.number + 1
            yield message

    async def _fill_gap(self, first: int, number: int) -> AsyncIterator[Message | Lost]:
        """The missing messages before `number`, and later ones that the engine remembers."""
        remembered: list[Message] = []
        try:
            remembered = await self._replay(first)
        except UnavailableError as error:
            log.warning("no replay", error=str(error))
        for message in remembered:
            assert self._next is not None, "a gap is a gap after something"
            if message.number > self._next:
                yield Lost(f"messages {self._next} to {message.number - 1} are missing")
            if message.number >= self._next:
                self._next = message.number + 1
                yield message
        assert self._next is not None, "as above"
        if number > self._next:
            yield Lost(f"messages {self._next} to {number - 1} are missing")

    # --- sockets ------------------------------------------------------------------------------------------------------

    async def _receive(self, subscription: zmq.asyncio.Socket) -> None:
        while True:
            frames = await subscription.recv_multipart()
            if len(frames) == 3 and len(frames[1]) == NUMBER_BYTES:
                await self._queue.put(Message(int.from_bytes(frames[1], "big"), frames[2]))
            else:
                log.warning("not a message of vLLM's", frames=len(frames))

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            await self._queue.put(_Connection(up=event == zmq.EVENT_HANDSHAKE_SUCCEEDED))

    async def _until_connected(self) -> None:
        """Drops what comes before the connection, because it is from an engine that is gone."""
        while True:
            item = await self._queue.get()
            if isinstance(item, _Connection) and item.up:
                return

    async def _replay(self, first: int) -> list[Message]:
        """Raises UnavailableError."""
        endpoint, socket = self._replay_endpoint, self._context.socket(zmq.DEALER)
        try:
            _connect(socket, endpoint, "replay")
            messages: list[Message] = []
            await socket.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
            while True:
                async with asyncio.timeout(self._timeout_s):
                    frames = await socket.recv_multipart()
                number, payload = _answer(frames, endpoint)
                if number == END_OF_REPLAY:
                    return messages
                messages.append(Message(int.from_bytes(number, "big"), payload))
        except TimeoutError as error:
            raise UnavailableError(f"no vLLM replay endpoint at {endpoint} within {self._timeout_s:g} s") from error
        finally:
            socket.close(linger=0)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        return socket


def _answer(frames: list[bytes], endpoint: str) -> tuple[bytes, bytes]:
    """Number and payload of an answer to a replay. Raises UnavailableError."""
    match frames:
        case [b"", _, number, payload] | [b"", number, payload] if len(number) == NUMBER_BYTES:
            return number, payload
    sizes = ", ".join(str(len(frame)) for frame in frames[:8])
    raise UnavailableError(
        f"{endpoint} does not speak like vLLM's replay endpoint: it answers with {len(frames)} frames of {sizes} bytes "
        "where (empty, topic, number of 8 bytes, payload) is expected"
    )


def _connect(socket: zmq.asyncio.Socket, endpoint: str, option: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(option, f"{endpoint!r} cannot be connected to: {error.strerror or error}") from error
