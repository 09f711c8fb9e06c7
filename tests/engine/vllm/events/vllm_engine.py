"""An imitation of a vLLM engine's event side, for faults that a real one cannot be made to show.

Its messages are those of the recording that `python -m tests.vllm.record_events` makes of a real engine, with other
values in their fields. Its PUB socket sends [topic, number, payload]; its ROUTER socket answers a request for the
messages from a number on.
"""

import asyncio
import base64
import json
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tests.test_packaging import ROOT

RECORDING = json.loads((ROOT / "tests" / "data" / "vllm_events.json").read_text())
RECORDED = "maps in an array"  # as the recorded version sends
FORMS = ["arrays", RECORDED, "maps"]  # by age


def recorded(what: str = "published") -> list[list[bytes]]:
    """The frames of each message: "published" ones, or the first and the last of those that are "replayed"."""
    return [[base64.b64decode(frame) for frame in frames] for frames in RECORDING[what]]


def _templates() -> dict[str, dict[str, Any]]:
    """The first recorded event of each kind, all fields in vLLM's order."""
    events = [event for frames in recorded() for event in msgspec.msgpack.decode(frames[2])[1]]
    return {event["type"]: event for event in reversed(events)}


TEMPLATES = _templates()


class Messages:
    """Builds payloads."""

    def __init__(self, form: str = RECORDED, rank: int | None = 0, block_size: int = 4) -> None:
        self._form = form
        self._rank = rank
        self._block_size = block_size

    def stored(self, names: list[Any], parent: Any, token_ids: list[int], **fields: Any) -> Any:
        values = {"block_hashes": names, "parent_block_hash": parent, "token_ids": token_ids, "extra_keys": None}
        return self._event("BlockStored", values | {"block_size": self._block_size} | fields)

    def removed(self, names: list[Any], medium: str | None = "GPU", group_idx: int | None = None) -> Any:
        return self._event("BlockRemoved", {"block_hashes": names, "medium": medium, "group_idx": group_idx})

    def cleared(self) -> Any:
        return self._event("AllBlocksCleared", {})

    def payload(self, *events: Any) -> bytes:
        ts, _, rank = msgspec.msgpack.decode(recorded()[0][2])
        assert isinstance(rank, int)
        batch = {"ts": ts, "events": list(events), "data_parallel_rank": self._rank}
        return msgspec.msgpack.encode(batch if self._form == "maps" else list(batch.values()))

    def _event(self, kind: str, values: dict[str, Any]) -> Any:
        """Older engines put the values alone into an array, the kind first."""
        event = TEMPLATES[kind] | values
        assert event.keys() == TEMPLATES[kind].keys(), "a field that vLLM does not send"
        return list(event.values()) if self._form == "arrays" else event


class Engine:
    """The sockets. `lose` makes it imperfect."""

    def __init__(self, remembered: int = 10_000, replays_topic: bool = True) -> None:
        """`replays_topic`: whether answers to a replay have the topic, as those of the recorded version have."""
        self._replays_topic = replays_topic
        self._context = zmq.asyncio.Context()
        self._remembered: deque[tuple[int, bytes]] = deque(maxlen=remembered)
        self._next = 0
        self._pub: zmq.asyncio.Socket | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0
        self.replay_port = 0
        self.replays = 0

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.replay_port}"

    async def start(self) -> None:
        """Numbers begin at 0 again, on the same ports."""
        self.begin_again()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB socket that tells of its subscribers
        self.port = await _bind(self._pub, self.port)
        self._router = self._context.socket(zmq.ROUTER)
        self.replay_port = await _bind(self._router, self.replay_port)
        self._serving = asyncio.create_task(self._serve_replays(self._router))

    def begin_again(self) -> None:
        """Another engine behind the same sockets: numbers begin at 0, and what was said is forgotten."""
        self._next = 0
        self._remembered.clear()

    async def subscribed(self) -> None:
        """Returns when somebody listens."""
        assert self._pub is not None
        async with asyncio.timeout(60):
            while not (await self._pub.recv()).startswith(b"\x01"):
                pass

    async def publish(self, payload: bytes, lose: bool = False) -> None:
        """`lose`: it does not arrive, though the engine remembers it."""
        assert self._pub is not None
        number, self._next = self._next, self._next + 1
        self._remembered.append((number, payload))
        if not lose:
            await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def send_raw(self, frames: list[bytes]) -> None:
        assert self._pub is not None
        await self._pub.send_multipart(frames)

    async def stop(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(linger=0)
        self._pub = self._router = self._serving = None

    async def close(self) -> None:
        await self.stop()
        self._context.term()

    async def _serve_replays(self, router: zmq.asyncio.Socket) -> None:
        _, end = recorded("replayed")
        while True:
            client, empty, first = await router.recv_multipart()
            self.replays += 1
            for number, payload in list(self._remembered):
                if number >= int.from_bytes(first, "big"):
                    answer = [empty, b"", number.to_bytes(8, "big"), payload]
                    await router.send_multipart([client, *self._in_its_form(answer)])
            await router.send_multipart([client, *self._in_its_form(end)])

    def _in_its_form(self, answer: list[bytes]) -> list[bytes]:
        return answer if self._replays_topic else [answer[0], *answer[2:]]


async def _bind(socket: zmq.asyncio.Socket, port: int) -> int:
    """ZeroMQ closes sockets in the background, so that a port may still be taken for a moment."""
    if not port:
        return int(socket.bind_to_random_port("tcp://127.0.0.1"))
    async with asyncio.timeout(30):
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
                return port
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                await asyncio.sleep(0.005)
