"""A gRPC client that begins messages and ends none, as fast as the server's flow control lets it."""

import asyncio
import contextlib
import struct
from collections import defaultdict

from tests.fuzz.doors.http2_frames import (
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    literal,
)

ACK = 1
INITIAL_WINDOW_SIZE = 4
MAX_FRAME_BYTES = 16384


class Unfinished:
    """One connection with `num_calls` messages, each of which announces `num_bytes` and comes without its last byte."""

    def __init__(self, path: str, num_calls: int, num_bytes: int) -> None:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
        fields += [("content-type", "application/grpc"), ("te", "trailers")]
        self._head = b"".join(literal(*field) for field in fields)
        self._announced = struct.pack(">BI", 0, num_bytes)
        self._left = {2 * number + 1: num_bytes + len(self._announced) - 1 for number in range(num_calls)}
        self._stream_window = 65535
        self._granted: dict[int, int] = defaultdict(int)  # beyond the stream window; 0: of the connection
        self._granted[0] = 65535
        self._sent: dict[int, int] = defaultdict(int)
        self._may_send = asyncio.Event()
        self.ended = 0  # by the server

    async def run(self, port: int) -> None:
        """Until it is cancelled or the server hangs up."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
            for stream in self._left:
                writer.write(frame(HEADERS, END_HEADERS, stream, self._head))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen(reader, writer))
                tasks.create_task(self._send(writer))
        finally:
            writer.transport.abort()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        while True:
            self._may_send.clear()
            for stream in list(self._left):
                while (count := self._sendable(stream)) > 0:
                    begun = self._sent[stream]
                    payload = self._announced[begun : begun + count]
                    writer.write(frame(DATA, 0, stream, payload + bytes(count - len(payload))))
                    self._sent[stream] += count
                    self._sent[0] += count
                    self._left[stream] -= count
                    await writer.drain()
            await self._may_send.wait()

    @property
    def held_bytes(self) -> int:
        """Sent in calls that the server has not ended."""
        return sum(self._sent[stream] for stream in self._left)

    def _sendable(self, stream: int) -> int:
        ours = self._stream_window + self._granted[stream] - self._sent[stream]
        return min(self._left.get(stream, 0), ours, self._granted[0] - self._sent[0], MAX_FRAME_BYTES)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(head[:3]))
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                if kind == SETTINGS and not flags & ACK:
                    for name, value in struct.iter_unpack(">HI", payload):
                        if name == INITIAL_WINDOW_SIZE:
                            self._stream_window = value
                    writer.write(frame(SETTINGS, ACK, 0, b""))
                elif kind == WINDOW_UPDATE:
                    self._granted[stream] += int.from_bytes(payload)
                elif kind == PING and not flags & ACK:
                    writer.write(frame(PING, ACK, 0, payload))
                elif stream and flags & 1 and stream in self._left:
                    self.ended += 1
                    del self._left[stream], self._sent[stream]
                self._may_send.set()
