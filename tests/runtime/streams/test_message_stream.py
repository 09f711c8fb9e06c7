"""Streams of messages over real sockets: what arrives, and how either end learns that the other has left or hangs."""

import asyncio
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from baton_proto.decoding import decoder
from baton_proto.sampling import SamplingParams
from baton_proto.worker import MAJOR, STEPS, Cancel, Hello, Refused, Submit, decode_greeting, encode
from runtime.errors import ProtocolError, UnauthorizedError
from runtime.security.cluster_key import ClusterKey, new_cluster_key
from runtime.security.handshake import MAX_FRAME_BYTES, NONCE_BYTES, PROOF_BYTES
from runtime.streams import message_stream
from runtime.streams.message_stream import ENDED, MessageStream, accept_streams, dial, open_stream
from tests.busy_core import busy_core
from tests.freezing import freeze
from worker import stream_server
from worker.stream_server import StreamServer

KEY = new_cluster_key()
decode_cancel = decoder(Cancel | Refused)
decode_long = decoder(Submit)

SILENT_SERVER = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection = server.accept()
time.sleep(60)
"""

SLOW_SERVER = """
import socket, time
from runtime.host import process_name
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], process_name(), sep="\\n", flush=True)
connection, _ = server.accept()
until_s = time.process_time() + 0.15
while time.process_time() < until_s: pass
connection.sendall(bytes(4))
print("computed", flush=True)
time.sleep(60)
"""


@dataclass
class Pair:
    ours: MessageStream
    theirs: MessageStream


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    accepted: asyncio.Queue[MessageStream] = asyncio.Queue()
    server = await accept_streams("127.0.0.1", 0, accepted.put_nowait)
    ours = await dial(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", "them")
    both = Pair(ours, await accepted.get())
    yield both
    both.ours.abort("over")
    both.theirs.abort("over")
    server.close()


def long(num_bytes: int) -> Submit:
    return Submit("r", bytes(num_bytes), 0, SamplingParams(max_tokens=1), 1.0)


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 7, 1000])
async def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(cut: int) -> None:
    sent = [long(size) for size in (0, 1, 100, 3000)] * 3
    data = b"".join(struct.pack("<I", len(encode(message))) + encode(message) + bytes(4) for message in sent)
    stream, got = MessageStream("them"), []
    stream.listen(decode_long, got.append)
    for begin in range(0, len(data), cut):
        stream.data_received(data[begin : begin + cut])
    assert got == sent


async def test_messages_flow_both_ways_and_those_that_came_before_listening_are_not_lost(pair: Pair) -> None:
    for number in range(100):
        pair.ours.send(Cancel(str(number)))
        pair.theirs.send(Cancel(str(-number)))
    assert await pair.theirs.receive(decode_cancel) == Cancel("0")
    got: list[Any] = []
    done = asyncio.Event()
    pair.theirs.listen(decode_cancel, lambda message: (got.append(message), len(got) == 99 and done.set()))
    await asyncio.wait_for(done.wait(), 30)
    assert got == [Cancel(str(number)) for number in range(1, 100)]
    assert [await pair.ours.receive(decode_cancel) for _ in range(100)] == [Cancel(str(-n)) for n in range(100)]


async def test_what_was_sent_before_closing_arrives_and_then_the_end(pair: Pair) -> None:
    pair.ours.send(long(1_000_000))
    pair.ours.close()
    assert await pair.theirs.receive(decode_long) == long(1_000_000)
    assert await asyncio.wait_for(pair.theirs.ended(), 30) == ENDED
    with pytest.raises(ConnectionError, match="ended"):
        await pair.theirs.receive(decode_cancel)
    pair.theirs.send(Cancel("nobody hears it"))


async def test_what_the_peer_says_meanwhile_does_not_make_the_end_look_like_a_crash(pair: Pair) -> None:
    heard: list[Any] = []
    pair.ours.listen(decode_cancel, heard.append)
    for _ in range(10):
        pair.theirs.send(Cancel("too late"))
    pair.ours.close()
    pair.ours.send(Cancel("nobody hears it"))
    assert await asyncio.wait_for(pair.theirs.ended(), 30) == ENDED
    assert await asyncio.wait_for(pair.ours.ended(), 30) == ENDED
    assert heard == []


async def test_a_peer_that_does_not_close_its_end_is_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_stream, "LINGER_S", 0.05)
    monkeypatch.setattr(pair.theirs, "eof_received", lambda: True)  # asyncio keeps the other direction open
    pair.ours.close()
    assert await asyncio.wait_for(pair.ours.ended(), 30) == ENDED


async def test_a_refusal_tells_the_peer_why(pair: Pair) -> None:
    pair.theirs.refuse("not you")
    with pytest.raises(ProtocolError, match="them: not you"):
        await pair.ours.receive(decode_cancel)
    assert await asyncio.wait_for(pair.ours.ended(), 30) == "not you"


async def test_a_message_of_another_kind_and_one_too_long_end_the_stream(pair: Pair) -> None:
    pair.theirs.listen(decode_cancel, lambda _: None)
    pair.ours.send(Hello(MAJOR, "again"))
    assert "cannot be decoded" in await asyncio.wait_for(pair.theirs.ended(), 30)
    stream = MessageStream("them")
    stream.listen(decode_cancel, lambda _: None)
    stream.data_received(struct.pack("<I", 1 << 30))
    assert "announces 1073741824 bytes" in (stream._reason or "")


async def test_a_message_that_nobody_can_deal_with_ends_the_stream_and_says_so(pair: Pair) -> None:
    def stumble(_: Any) -> None:
        raise KeyError("what is this")

    pair.theirs.listen(decode_cancel, stumble)
    pair.ours.send(Cancel("r"))
    with pytest.raises(ProtocolError, match="what is this"):
        await pair.ours.receive(decode_cancel)


async def test_a_quiet_stream_stays_open(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a silent peer would be borne."""
    monkeypatch.setattr(message_stream, "PING_INTERVAL_S", 0.05)
    for stream in (pair.ours, pair.theirs):
        stream._tick()
    await asyncio.sleep(0.05 * (message_stream.SILENT_PINGS + 3))
    pair.ours.send(Cancel("still here"))
    assert await pair.theirs.receive(decode_cancel) == Cancel("still here")


async def test_a_peer_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", SILENT_SERVER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            monkeypatch.setattr(message_stream, "PING_INTERVAL_S", 0.05)
            stream = await dial(f"127.0.0.1:{int(process.stdout.readline())}", "them")
            freeze(process.pid)
            assert (await asyncio.wait_for(stream.ended(), 30)).startswith("silent for")
        finally:
            process.kill()


async def test_a_peer_that_merely_waits_for_a_core_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_stream, "PING_INTERVAL_S", 0.2)
    command = [sys.executable, "-c", SLOW_SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            port, name = int(process.stdout.readline()), process.stdout.readline().strip()
            with busy_core(process.pid):
                stream = await dial(f"127.0.0.1:{port}", "them")
                stream.note_process(name)
                computed = asyncio.create_task(asyncio.to_thread(process.stdout.readline))
                await asyncio.wait({computed}, timeout=3.0)
                assert not computed.done(), "it was never without a core; this shows nothing"
                assert not stream._ended.done()
            await computed
            assert (await asyncio.wait_for(stream.ended(), 30)).startswith("silent for")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(MAJOR, "router-0", 41, STEPS), "runs as incarnation 42, not 41"),
        (Hello(MAJOR + 1, "router-0", 42, STEPS), f"version {MAJOR + 1} of the worker protocol"),
        (Hello(MAJOR, "router-0", 42, "gossip"), "takes no 'gossip' streams"),
        (Cancel("r1"), "must be a hello"),
    ],
)
async def test_a_wrong_hello_is_refused_with_the_reason(hello: Any, reason: str) -> None:
    async def nobody(stream: MessageStream, sender: str) -> None:
        raise AssertionError("was let in")

    server = StreamServer(Hello(MAJOR, "decode-0", 42), {STEPS: nobody})
    stream = await dial(await server.start("127.0.0.1"), "decode-0")
    stream.send(hello)
    with pytest.raises(ProtocolError, match=reason):
        await stream.receive(decode_greeting)
    await server.stop(1.0)
    assert reason in await stream.ended()


async def nobody(stream: MessageStream, sender: str) -> None:
    raise AssertionError("was let in")


@asynccontextmanager
async def guarded_server(admitted: Any = nobody) -> AsyncIterator[str]:
    """The address of one that asks for KEY."""
    server = StreamServer(Hello(MAJOR, "decode-0", 42), {STEPS: admitted}, KEY)
    yield await server.start("127.0.0.1")
    await server.stop(0.1)


async def test_who_has_the_cluster_key_is_let_in() -> None:
    admitted: asyncio.Queue[str] = asyncio.Queue()

    async def admit(stream: MessageStream, sender: str) -> None:
        admitted.put_nowait(sender)

    async with guarded_server(admit) as address:
        stream, theirs = await open_stream(address, "decode-0", Hello(MAJOR, "router-0", 42, STEPS), 60, KEY)
        assert theirs.sender == "decode-0"
        assert await admitted.get() == "router-0"
        stream.abort("over")


@pytest.mark.parametrize("key", [new_cluster_key(), None], ids=["another", "none"])
async def test_who_does_not_have_the_cluster_key_is_told_nothing_but_that_it_is_over(key: ClusterKey | None) -> None:
    async with guarded_server() as address:
        with pytest.raises((UnauthorizedError, ConnectionError), match=r"its cluster key is not ours|ended|reset"):
            await open_stream(address, "decode-0", Hello(MAJOR, "router-0", 42, STEPS), 60, key)


async def test_a_worker_that_cannot_prove_that_it_has_the_cluster_key_is_told_nothing() -> None:
    heard: list[bytes] = []
    over = asyncio.Event()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readexactly(4 + MAX_FRAME_BYTES))
        writer.write(struct.pack("<I", NONCE_BYTES) + bytes(NONCE_BYTES))
        heard.append(await reader.readexactly(4 + PROOF_BYTES))
        writer.write(struct.pack("<I", PROOF_BYTES) + bytes(PROOF_BYTES))
        with suppress(ConnectionResetError):
            heard.append(await reader.read())
        writer.close()
        over.set()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(UnauthorizedError, match=r"decode-0 refuses us: .* has another cluster key"):
        await open_stream(address, "decode-0", Hello(MAJOR, "router-0", 42, STEPS), 60, KEY)
    await asyncio.wait_for(over.wait(), 30)
    server.close()
    assert heard[2:] in ([], [b""])


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(50), struct.pack("<I", 41), encode(Hello(MAJOR, "r", 42, STEPS))]
)
async def test_a_stranger_hears_nothing_and_is_left(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_server, "HELLO_TIMEOUT_S", 1.5)  # longer than until the first ping
    async with guarded_server() as address:
        reader, writer = await asyncio.open_connection(*address.split(":"))
        writer.write(said)
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
