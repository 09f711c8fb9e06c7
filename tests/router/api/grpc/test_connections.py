"""gRPC clients that hold connections and ask for nothing."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from router.api.grpc import connections
from router.api.grpc.connections import OPEN_FILES, GrpcConnections, _Found, _peer_of, _sockets_at
from router.api.serving import grpc_api
from router.api.serving.grpc_api import SERVER_OPTIONS, GrpcApi
from tests.fuzz.doors.http2_frames import CONTINUATION, HEADERS, PREFACE, SETTINGS, frame, literal
from tests.router.api.conversations import grpc_serving
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer

PLACES = 40


@pytest.fixture
async def api(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrpcApi]:
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))
    async with grpc_serving(frontend, max_connections=PLACES, connection_age_s=600.0) as api:
        yield api


def num_open(api: GrpcApi) -> int:
    return len([found for found in _sockets_at(api.port) if found.peer])


def copies_of(number: int) -> int:
    """Open files of this process that are the same socket, itself included."""
    links = [os.path.realpath(f"{OPEN_FILES}/{each}") for each in os.listdir(OPEN_FILES)]
    return links.count(os.path.realpath(f"{OPEN_FILES}/{number}"))


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


async def test_a_look_at_connections_makes_no_copy_of_them(api: GrpcApi) -> None:
    """The system would tell gRPC what becomes of a copy, after gRPC has closed its own and opened others."""
    with socket.create_connection(("127.0.0.1", api.port)):
        while num_open(api) < 1:
            await asyncio.sleep(0.01)
        seen = [(found, copies_of(found.number)) for found in _sockets_at(api.port)]
    assert [found.peer is None for found, _ in seen].count(False) == 1
    assert {copies for _, copies in seen} == {1}


def test_a_look_ends_well_though_a_connection_s_number_goes_to_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    borrowed = connections._borrowed
    with socket.socket(socket.AF_UNIX) as other, socket.create_server(("127.0.0.1", 0)) as listener:
        number, port = listener.fileno(), listener.getsockname()[1]

        @contextlib.contextmanager
        def changing_hands(number: int) -> Iterator[socket.socket]:
            with borrowed(number) as one:
                os.dup2(other.fileno(), number)
                yield one

        assert number in [found.number for found in _sockets_at(port)]
        monkeypatch.setattr(connections, "_borrowed", changing_hands)
        assert connections._at(port, number) is None


async def test_buffers_are_bounded_before_anybody_connects(api: GrpcApi) -> None:
    with socket.create_connection(("127.0.0.1", api.port)):
        while num_open(api) < 1:
            await asyncio.sleep(0.01)
        for found in _sockets_at(api.port):
            with connections._borrowed(found.number) as one:
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * connections.BUFFER_BYTES


async def test_heads_that_no_call_reads_are_bounded_over_all_connections(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would hold 16 MiB for each client that does not agree to its settings. Messages that calls have read count
    for nothing, and a busy event loop puts off no closing."""
    of_a_head, unknown_field = literal("x" * 100, "y" * 3900), b"\x92\x03\x80\x80\x20" + bytes(1 << 19)
    patient = [(name, value) for name, value in SERVER_OPTIONS if name != "grpc.http2.settings_timeout"]
    monkeypatch.setattr(grpc_api, "SERVER_OPTIONS", [*patient, ("grpc.http2.settings_timeout", 600_000)])
    monkeypatch.setattr(connections, "UNSEEN_BYTES", 1 << 20)
    monkeypatch.setattr(connections, "GROWN_BYTES", 0)
    frontend = make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))
    limit = frontend.bodies.limit_bytes

    def until_closed(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, 0, 1, of_a_head))
            stranger.sendall(frame(CONTINUATION, 0, 1, of_a_head) * ((2 << 20) // len(of_a_head)))
            while stranger.recv(1 << 16):
                pass

    async with grpc_serving(frontend, connection_age_s=600.0) as api:
        known, asked = stub(api)
        async with known:
            for _ in range(2 * limit // len(unknown_field)):
                await known.unary_unary("/baton.v1.Inference/ListModels")(unknown_field, timeout=60)
            strangers = [threading.Thread(target=until_closed, args=(api.port,), daemon=True) for _ in range(3)]
            for stranger in strangers:
                stranger.start()
            for stranger in strangers:
                stranger.join(60)  # the event loop stands still
                assert not stranger.is_alive()
            assert known.get_state() is grpc.ChannelConnectivity.READY, "it was never closed"
            await asked.ListModels(pb.ListModelsRequest(), timeout=60)


def test_heads_have_a_bound_of_their_own_and_messages_under_way_may_be_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNSEEN_BYTES", 16)
    crowd = GrpcConnections(PLACES, 100)

    def closed(reading: list[int], idle: list[int]) -> list[int]:
        """What has come over connections whose messages are being read, and over others, of those that are closed."""
        come = [_Found(port, ("127.0.0.1", port), count) for port, count in enumerate([*reading, *idle])]
        ended: list[_Found] = []
        monkeypatch.setattr(connections, "_end", ended.append)
        with contextlib.ExitStack() as held:
            for found in come[: len(reading)]:
                held.enter_context(crowd.reading(f"ipv4:127.0.0.1:{found.number}"))
            crowd._close_fullest({found.peer: found for found in come if found.peer})
        return [found.received for found in sorted(ended)]

    assert closed(reading=[60, 40], idle=[8, 8]) == []
    assert closed(reading=[60, 40], idle=[6, 8, 1, 2]) == [6, 8, 2]
    assert closed(reading=[60, 57], idle=[]) == [60]
    crowd.has_read("ipv4:127.0.0.1:0", 60 - connections.FRAMES_BYTES)
    assert closed(reading=[60, 57], idle=[]) == []


def test_looks_go_on_after_a_closing_though_the_process_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNSEEN_BYTES", 16)
    monkeypatch.setattr(connections, "_memory_bytes", lambda: 0)
    crowd, looks = GrpcConnections(PLACES, 100), list[int]()

    def looked(port: int) -> None:
        looks.append(port)
        crowd.stop()

    monkeypatch.setattr(crowd, "_look", looked)
    monkeypatch.setattr(connections, "_end", lambda found: None)
    crowd._close_fullest({(peer := ("127.0.0.1", 80)): _Found(0, peer, 17)})
    ending = threading.Timer(connections.ALERT_S, crowd.stop)
    ending.start()
    crowd.watch(1)
    ending.cancel()
    assert looks == [1]


def test_a_connection_counts_as_idle_between_its_calls() -> None:
    crowd = GrpcConnections(PLACES, 0)
    with crowd.call("ipv4:127.0.0.1:80"), crowd.call("ipv4:127.0.0.1:80"):
        assert dict(crowd._running) == {("127.0.0.1", 80): 2}
    assert (dict(crowd._running), list(crowd._ended)) == ({}, [("127.0.0.1", 80)])
    assert [_peer_of(peer) for peer in ("ipv6:%5B::1%5D:80", "ipv4:10.0.0.7:65535", "unix:", "")] == [
        ("::1", 80),
        ("10.0.0.7", 65535),
        ("", 0),
        ("", 0),
    ]
