"""A vLLM engine's event side, as its documentation describes it: the same encoding, the same sockets.

vLLM encodes its batches with msgspec: structs with a tag and without their default fields, up to now as arrays, in
newer releases as maps. Its PUB socket sends [topic, number, payload]; its ROUTER socket answers a request for the
messages from a number on.
"""

import asyncio
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio


def message_types(array_like: bool) -> dict[str, Any]:
    """Struct types with vLLM's names and fields."""
    how = {"array_like": array_like, "omit_defaults": True, "gc": False}
    names = int | bytes
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[names]),
            ("parent_block_hash", names | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
            ("extra_keys", list[tuple[Any, ...] | None] | None, None),
            ("group_idx", int | None, None),
        ],
        tag=True,
        **how,
    )
    removed = msgspec.defstruct(
        "BlockRemoved",
        [("block_hashes", list[names]), ("medium", str | None), ("group_idx", int | None, None)],
        tag=True,
        **how,
    )
    cleared = msgspec.defstruct("AllBlocksCleared", [], tag=True, **how)
    batch = msgspec.defstruct(
        "KVEventBatch", [("ts", float), ("events", list[Any]), ("data_parallel_rank", int | None, None)], **how
    )
    return {"stored": stored, "removed": removed, "cleared": cleared, "batch": batch}


class Messages:
    """Builds payloads."""

    def __init__(self, array_like: bool = True, rank: int | None = 0, block_size: int = 4) -> None:
        self._types = message_types(array_like)
        self._rank = rank
        self._block_size = block_size
        self._encoder = msgspec.msgpack.Encoder()

    def stored(self, names: list[Any], parent: Any, token_ids: list[int], **fields: Any) -> Any:
        defaults = {"block_size": self._block_size, "lora_id": None, "medium": "GPU", "lora_name": None}
        return self._types["stored"](
            block_hashes=names, parent_block_hash=parent, token_ids=token_ids, **(defaults | fields)
        )

    def removed(self, names: list[Any], medium: str | None = "GPU", group_idx: int | None = None) -> Any:
        return self._types["removed"](block_hashes=names, medium=medium, group_idx=group_idx)

    def cleared(self) -> Any:
        return self._types["cleared"]()

    def payload(self, *events: Any) -> bytes:
        return self._encoder.encode(self._types["batch"](ts=1.0, events=list(events), data_parallel_rank=self._rank))


class Engine:
    """The sockets. `forget` and `lose` make it imperfect."""

    def __init__(self, topic: str = "", remembered: int = 10_000) -> None:
        self._context = zmq.asyncio.Context()
        self._topic = topic.encode()
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
        self._next = 0
        self._remembered.clear()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB socket that tells of its subscribers
        self.port = await _bind(self._pub, self.port)
        self._router = self._context.socket(zmq.ROUTER)
        self.replay_port = await _bind(self._router, self.replay_port)
        self._serving = asyncio.create_task(self._serve_replays(self._router))

    async def subscribed(self) -> None:
        """Returns when the bridge listens."""
        assert self._pub is not None
        async with asyncio.timeout(10):
            while not (await self._pub.recv()).startswith(b"\x01"):
                pass

    async def publish(self, payload: bytes, lose: bool = False) -> None:
        """`lose`: it does not arrive, though the engine remembers it."""
        assert self._pub is not None
        number, self._next = self._next, self._next + 1
        self._remembered.append((number, payload))
        if not lose:
            await self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

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
        while True:
            client, empty, first = await router.recv_multipart()
            self.replays += 1
            for number, payload in list(self._remembered):
                if number >= int.from_bytes(first, "big"):
                    await router.send_multipart([client, empty, number.to_bytes(8, "big"), payload])
            await router.send_multipart([client, empty, (-1).to_bytes(8, "big", signed=True), b""])


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
