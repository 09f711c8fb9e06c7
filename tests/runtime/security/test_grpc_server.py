import asyncio
import inspect
import re
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from runtime.security import grpc_server as module
from runtime.security.grpc_server import grpc_server
from tests.fuzz.doors.http2_frames import END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, literal

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = grpc_server([("grpc.so_reuseport", 0)], [])
    servicer = health.aio.HealthServicer()
    await servicer.set("", SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


async def is_serving(port: int) -> bool:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(), timeout=60)
        return bool(answer.status == SERVING)


async def test_grpcio_has_the_private_names_that_the_server_is_made_of() -> None:
    """No public API reaches the loop that accepts calls. Where one of these is gone, look whether a method's name still
    ends this loop; if it does not, `grpc.aio.server` does."""
    asked = set(re.findall(r"\bcygrpc\.(\w+)", inspect.getsource(module)))
    assert {"AioServer", "_handle_rpc"} < asked
    missing = [f"cygrpc.{name}" for name in sorted(asked) if not hasattr(cygrpc, name)]
    for name in ("_make_request_call_future", "_request_call", "is_running"):
        missing += [] if hasattr(cygrpc.AioServer, name) else [f"cygrpc.AioServer.{name}"]
    server = grpc.aio.server()
    missing += [f"grpc.aio.server().{name}" for name in ("_loop", "_server") if not hasattr(server, name)]
    assert not missing, f"grpcio {grpc.__version__} has no {', '.join(missing)}"


async def test_a_method_whose_name_is_not_utf_8_does_not_end_the_server(port: int) -> None:
    fields = {":method": "POST", ":scheme": "http", ":path": "/\xff", ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    head = b"".join(literal(name, value) for name, value in fields.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, head))
    answer = b""
    async with asyncio.timeout(60):
        while b"Method not found!" not in answer:
            answer += await reader.read(1000)
    writer.close()
    assert await is_serving(port)


async def test_unknown_methods_are_unimplemented_again_and_again(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name in ("/grpc.health.v1.Health/Nothing", "/nobody.Service/Method", "/"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(name)(b"", timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert await is_serving(port)
