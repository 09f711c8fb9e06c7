"""gRPC clients that hold connections and ask for nothing."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from router.api.grpc import connections
from router.api.grpc.connections import GrpcConnections, _peer_of, _sockets_at
from router.api.serving.grpc_api import GrpcApi
from tests.fuzz.doors.http2_frames import PREFACE, SETTINGS, frame
from tests.router.api.conversations import grpc_serving
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer

PLACES = 40


@pytest.fixture
async def api(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrpcApi]:
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))
    async with grpc_serving(frontend, max_connections=PLACES) as api:
        yield api


def num_open(api: GrpcApi) -> int:
    with contextlib.ExitStack() as copies:
        return len([peer for peer, copy in _sockets_at(api.port) if copies.enter_context(copy) and peer])


def stub(api: GrpcApi) -> tuple[grpc.aio.Channel, pb_grpc.InferenceStub]:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{api.port}", [("grpc.use_local_subchannel_pool", 1)])
    return channel, pb_grpc.InferenceStub(channel)


@pytest.mark.parametrize("said", [b"", PREFACE + frame(SETTINGS, 0, 0, b"")], ids=["silent", "HTTP/2"])
async def test_who_asks_for_nothing_makes_room_for_who_does(api: GrpcApi, said: bytes) -> None:
    async def calls(asked: pb_grpc.InferenceStub) -> pb.ListModelsResponse:
        return await asked.ListModels(pb.ListModelsRequest(), timeout=60, wait_for_ready=True)

    known, asked = stub(api)
    async with known:
        await calls(asked)
        with contextlib.ExitStack() as held:
            for _ in range(5 * PLACES):
                one = held.enter_context(socket.create_connection(("127.0.0.1", api.port)))
                with contextlib.suppress(OSError):  # it has no place
                    one.sendall(said)
                await asyncio.sleep(0)
            while num_open(api) > PLACES:  # native threads close those without a place
                await asyncio.sleep(0.01)
            newcomer, asks = stub(api)
            async with newcomer:
                await calls(asks)
            await asyncio.sleep(0)
            assert known.get_state() is grpc.ChannelConnectivity.READY, "it was never closed"
            await calls(asked)


def test_a_connection_counts_as_idle_between_its_calls() -> None:
    crowd = GrpcConnections(PLACES)
    with crowd.call("ipv4:127.0.0.1:80"), crowd.call("ipv4:127.0.0.1:80"):
        assert dict(crowd._running) == {("127.0.0.1", 80): 2}
    assert (dict(crowd._running), list(crowd._ended)) == ({}, [("127.0.0.1", 80)])
    assert [_peer_of(peer) for peer in ("ipv6:%5B::1%5D:80", "ipv4:10.0.0.7:65535", "unix:", "")] == [
        ("::1", 80),
        ("10.0.0.7", 65535),
        ("", 0),
        ("", 0),
    ]
