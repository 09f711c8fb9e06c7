"""Calls that are given up as soon as they are made."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from baton_proto.generated import inference_pb2 as pb
from router.api.serving.grpc_api import GrpcApi
from runtime.security.grpc_bearer import MAX_PENDING
from tests.fuzz.doors.http2_frames import (
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    literal,
)
from tests.router.api.conversations import grpc_serving
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer

ACK, CANCEL = 1, 8
CONNECTIONS = 16
METHOD = "/baton.v1.Inference/ListModels"
FIELDS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": METHOD,
    ":authority": "x",
    "content-type": "application/grpc",
    "te": "trailers",
}
HEAD = b"".join(literal(name, value) for name, value in FIELDS.items())


@pytest.fixture
async def api(tiny_model: Path) -> AsyncIterator[GrpcApi]:
    async with grpc_serving(make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))) as api:
        yield api


async def test_calls_of_strangers_that_are_given_up_take_nobody_elses_places(api: GrpcApi) -> None:
    """All of them come while Python takes none, so gRPC has to keep or refuse each."""
    with contextlib.ExitStack() as strangers, grpc.insecure_channel(f"127.0.0.1:{api.port}") as channel:
        await asyncio.to_thread(grpc.channel_ready_future(channel).result, 60)
        for _ in range(CONNECTIONS):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=60))
            give_up_calls(stranger, 2 * MAX_PENDING // CONNECTIONS)
        ask = channel.unary_unary(METHOD, pb.ListModelsRequest.SerializeToString, pb.ListModelsResponse.FromString)
        honest = ask.future(pb.ListModelsRequest(), timeout=60)
        assert (await asyncio.to_thread(honest.result)).models


def give_up_calls(stranger: socket.socket, count: int) -> None:
    """Returns when the service has read all."""
    with stranger.makefile("rb") as frames:

        def await_frame(wanted: tuple[int, int]) -> None:
            seen = None
            while seen != wanted:
                head = frames.read(9)
                frames.read(int.from_bytes(head[:3]))
                seen = head[3], head[4]

        stranger.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        await_frame((SETTINGS, 0))
        stranger.sendall(frame(SETTINGS, ACK, 0, b""))
        for stream in range(1, 2 * count, 2):
            reset = frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))
            stranger.sendall(frame(HEADERS, END_HEADERS, stream, HEAD) + reset)
        stranger.sendall(frame(PING, 0, 0, bytes(8)))
        await_frame((PING, ACK))
