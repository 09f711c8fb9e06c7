"""A live stream server of a worker against peers that know the words and not the rules."""

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given, strategies as st
from structlog.testing import capture_logs

from baton_proto.decoding import decoder
from baton_proto.discovery import WorkerLoad
from baton_proto.worker import (
    MAJOR,
    STEPS,
    Cancel,
    Hello,
    Refused,
    Submit,
    WorkerCommand,
    WorkerReport,
    decode_greeting,
    encode,
)
from runtime.address import parse_address
from runtime.security.cluster_key import ClusterKey, new_cluster_key
from runtime.streams.length_prefix import framed
from runtime.streams.message_stream import open_stream
from tests.fuzz.budget import fuzzed
from tests.fuzz.shapes import almost, messages
from worker.step_stream import RouterStream, StepStreams
from worker.stream_server import StreamServer

OURS = Hello(MAJOR, "decode-0", incarnation=42)
LIMIT_S = 60.0

greeting = messages(Hello, version=st.just(MAJOR), incarnation=st.sampled_from((0, 42)), stream=st.just(STEPS))
said = st.tuples(almost(st.builds(encode, greeting)), st.lists(almost(st.builds(encode, messages(WorkerCommand)))))


class Echo:
    """Answers with what it has."""

    def submit(self, router: RouterStream, request: Submit) -> None:
        assert isinstance(request.num_prompt_tokens, int)

    def cancel(self, router: RouterStream, request_id: str) -> None:
        router.leave()

    def router_gone(self, router: RouterStream) -> None:
        pass


async def visit(key: ClusterKey | None, frames: list[bytes], cut: int) -> list[Any]:
    """Error lines of the log while a stranger talks, and a good peer after it."""
    streams = StepStreams(Echo(), 0.005, WorkerLoad)
    server = StreamServer(OURS, {STEPS: streams.serve}, key)
    address = await server.start("127.0.0.1")
    with capture_logs() as logs:
        reader, writer = await asyncio.open_connection(*parse_address(address))
        data = b"".join(map(framed, frames))
        writer.write(data[: len(data) - cut % (len(data) + 1)] if cut > 100 else data)
        writer.write_eof()
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()
            stream, _ = await open_stream(address, "decode-0", Hello(MAJOR, "router-0", 42), LIMIT_S, key)
            stream.send(Cancel("r1"))
            await stream.receive(decoder(WorkerReport))
        stream.abort("over")
        await server.stop(1.0)
    return [row for row in logs if row["log_level"] == "error"]


@pytest.mark.slow
@fuzzed(seconds=5)
@given(said=said, cut=st.integers(0, 200), keyed=st.booleans())
def test_a_stream_server_outlives_every_peer(said: tuple[bytes, list[bytes]], cut: int, keyed: bool) -> None:
    key = new_cluster_key() if keyed else None
    assert asyncio.run(visit(key, [said[0], *said[1]], cut)) == []


def test_what_is_sent_as_a_seed_is_understood() -> None:
    assert isinstance(decode_greeting(encode(OURS)), Hello)
    assert asyncio.run(visit(None, [encode(OURS), encode(Refused("bye"))], 0)) == []
