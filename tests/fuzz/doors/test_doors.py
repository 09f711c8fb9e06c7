"""Whatever strangers say to the router's ports: its process lives, logs no error, takes little memory, and answers the
next sound request. FUZZ_SECONDS: for all three."""

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import psutil
import pytest

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from tests.fuzz.doors import http2_frames, http_bytes
from tests.router.http_client import COMPLETION

SECONDS = float(os.environ.get("FUZZ_SECONDS", "15")) / 3
CORPUS = Path(__file__).parent.parent / "corpus"  # CORPUS/TARGET/*: what was once taken wrongly
AT_ONCE = 16  # clients
MORE_BYTES = 200 * 1024 * 1024  # of the router's memory, at most
pytestmark = [pytest.mark.slow, pytest.mark.timeout(int(SECONDS) + 180)]


class Router:
    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())
        self.http_port, self.grpc_port = ports["http"], ports["grpc"]
        self._process = process
        self._errors = errors

    async def check(self, said: object) -> None:
        """It lives, is content and answers."""
        try:
            url = f"http://127.0.0.1:{self.http_port}/v1/completions"
            async with httpx.AsyncClient(timeout=30) as http:
                assert (await http.post(url, json=COMPLETION)).status_code == 200
            async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
                call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="Hi"), timeout=30)
                assert [one async for one in call][-1].WhichOneof("event") == "finished"
            logged = self._errors.read_text(errors="replace")
            assert '"level": "error"' not in logged
            assert "Traceback" not in logged
        except Exception as error:
            state = f"ended with {self._process.poll()}, wrote {self._errors.read_text(errors='replace')[-3000:]}"
            raise AssertionError(f"{error!r}: the router {state}; one of these was said last: {said!r}") from error

    def memory(self) -> int:
        return int(psutil.Process(self._process.pid).memory_info().rss)


@pytest.fixture
def router(tiny_model: Path, tmp_path: Path) -> Iterator[Router]:
    errors = tmp_path / "stderr"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.doors.router_process", str(tiny_model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            yield Router(process, errors)
        finally:
            process.kill()


async def search(
    router: Router,
    name: str,
    invent: Callable[[random.Random], bytes],
    say: Callable[[bytes, random.Random], Awaitable[None]],
) -> None:
    chance = random.Random(name)
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    before = 0
    end_s = time.monotonic() + SECONDS
    while kept or time.monotonic() < end_s:
        said = [kept.pop() if kept else invent(chance) for _ in range(AT_ONCE)]
        await asyncio.gather(*(say(one, random.Random(chance.random())) for one in said))
        await router.check(said)
        before = before or router.memory()  # after the first round, which loads what is loaded lazily
    assert router.memory() < before + MORE_BYTES


async def speak(port: int, said: bytes, chance: random.Random) -> None:
    """In pieces or at once, then leaves: in order, in the middle or by a reset, having read or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(OSError, TimeoutError):
        for _ in range(chance.choice((1, 1, 3, 20))):
            piece = len(said) if chance.random() < 0.3 else chance.randint(0, len(said))
            writer.write(said[:piece])
            said = said[piece:]
            await asyncio.wait_for(writer.drain(), 60)
            await asyncio.sleep(0)
        writer.write(said)
        match chance.randrange(4):
            case 0:
                writer.write_eof()
                await asyncio.wait_for(reader.read(), 0.5)
            case 1:
                await asyncio.wait_for(reader.read(chance.randint(1, 5000)), 0.5)
            case 2:
                taken = writer.get_extra_info("socket")
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def test_bytes_on_the_http_port(router: Router) -> None:
    async def say(said: bytes, chance: random.Random) -> None:
        await speak(router.http_port, said, chance)

    await search(router, "http-bytes", http_bytes.conversation, say)


async def test_bytes_on_the_grpc_port(router: Router) -> None:
    async def say(said: bytes, chance: random.Random) -> None:
        await speak(router.grpc_port, said, chance)

    await search(router, "http2-frames", http2_frames.conversation, say)


async def test_messages_to_each_grpc_method(router: Router) -> None:
    """Sound HTTP/2 from a sound client; only the messages, deadlines and farewells are not."""
    shown = (("authorization", f"Bearer {http2_frames.OPERATOR}"),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.grpc_port}") as channel:

        async def say(said: bytes, chance: random.Random) -> None:
            method = f"/{chance.choice(http2_frames.METHODS[:-1])}"
            timeout_s = chance.choice((0.0, 0.001, 0.01, 0.1, 0.5))
            call = channel.unary_stream(method)(said, timeout=timeout_s, metadata=shown)
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                async for _ in call:
                    if chance.random() < 0.1:
                        call.cancel()

        await search(router, "grpc-messages", http2_frames.message, say)
