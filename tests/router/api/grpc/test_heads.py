"""The heads of gRPC calls: as large as honest clients have them, and those that name a field again and again."""

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from router.api.serving.grpc_api import GrpcApi
from runtime.security.grpc_bearer import MAX_HEAD_BYTES
from tests.fuzz.doors.http2_frames import END_HEADERS, END_STREAM, HEADERS, PING, PREFACE, SETTINGS, frame, literal
from tests.router.api.conversations import grpc_serving
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer

ACK = 1
KEPT = b"\x40" + literal("x" * 100, "y" * 3900)[1:]  # goes into the table of HPACK
BOMB = KEPT + b"\xbe" * 12_000  # and is named from there


@pytest.fixture
async def api(tiny_model: Path) -> AsyncIterator[GrpcApi]:
    async with grpc_serving(make_frontend(ScriptedGenerator(tiny_tokenizer(tiny_model)))) as api:
        yield api


@pytest.fixture
async def stub(api: GrpcApi) -> AsyncIterator[pb_grpc.InferenceStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
        yield pb_grpc.InferenceStub(channel)


async def test_heads_with_long_keys_and_traces_are_taken_every_time(stub: pb_grpc.InferenceStub) -> None:
    head = (("authorization", f"Bearer {'k' * 4000}"), ("tracestate", "t" * 8192))
    for _ in range(10):  # gRPC by itself refuses one of two
        await stub.ListModels(pb.ListModelsRequest(), metadata=head, timeout=60)


async def test_a_head_above_the_limit_is_refused(stub: pb_grpc.InferenceStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListModels(pb.ListModelsRequest(), metadata=(("x", "x" * MAX_HEAD_BYTES),), timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("agreed", [False, True], ids=["before SETTINGS are agreed", "after"])
async def test_nothing_is_held_of_a_refused_head(api: GrpcApi, agreed: bool) -> None:
    """gRPC by itself holds it for 0.1 to 1 s: the answers to pings after it come first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    kinds: list[tuple[int, int]] = []
    async with asyncio.timeout(60):
        writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
        assert await next_frame(reader) == (SETTINGS, 0)
        writer.write(frame(SETTINGS, ACK, 0, b"") if agreed else b"")
        writer.write(frame(HEADERS, END_HEADERS | END_STREAM, 1, BOMB))
        for _ in range(3):
            writer.write(frame(PING, 0, 0, bytes(8)))
            while (PING, 0) not in kinds:
                kinds.append(await next_frame(reader))
            kinds = [(kind, stream) for kind, stream in kinds if kind != PING]
    writer.close()
    assert (HEADERS, 1) in kinds


async def next_frame(reader: asyncio.StreamReader) -> tuple[int, int]:
    """Its kind and stream."""
    head = await reader.readexactly(9)
    kind, _, stream = struct.unpack(">BBI", head[3:])
    await reader.readexactly(int.from_bytes(head[:3]))
    return kind, stream
