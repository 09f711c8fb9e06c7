"""Cost of a message on a stream: gRPC, and TCP without and with TLS. CPU of the caller, and time.

    python -m benchmarks.stream_round_trip [--bytes 4096] [--round-trips 2000]

An echo in a child process, one message at a time, uvloop on both sides.
"""

import argparse
import asyncio
import multiprocessing
import resource
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any, cast

import grpc
import uvloop
from rich.console import Console
from rich.table import Table

from runtime.security.internal_tls import InternalTls

METHOD = "/echo/Echo"
SEED = bytes(32)
WARM_UP = 200

RoundTrip = Callable[[], Awaitable[None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--round-trips", type=int, default=2000)
    options = parser.parse_args()
    table = Table(title=f"{options.bytes} bytes there and back")
    for column in ("stream", "CPU us", "time us"):
        table.add_column(column, justify="left" if column == "stream" else "right")
    message = bytes(options.bytes)
    ways = {"gRPC": (_grpc_server, _grpc_client), "TCP": (_tcp_server, _tcp_client), "TLS": (_tls_server, _tls_client)}
    for name, (server, client) in ways.items():
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("spawn").Process(target=_serve, args=(server, theirs), daemon=True)
        child.start()
        cpu_s, time_s = uvloop.run(client(ours.recv(), message, options.round_trips))
        table.add_row(name, f"{cpu_s * 1e6:.0f}", f"{time_s * 1e6:.0f}")
        child.terminate()
        child.join()
    Console().print(table)


async def _timed(round_trip: RoundTrip, count: int) -> tuple[float, float]:
    """(CPU seconds of this process, seconds) per round trip."""
    for _ in range(WARM_UP):
        await round_trip()
    before, began_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(count):
        await round_trip()
    after, ended_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s / count, (ended_s - began_s) / count


def _serve(server: Callable[[Connection], Awaitable[None]], ready: Connection) -> None:
    async def run() -> None:
        await server(ready)

    uvloop.run(run())


async def _grpc_server(ready: Connection) -> None:
    async def echo(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        async for message in messages:
            await context.write(message)

    server = grpc.aio.server()
    handlers: Any = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready.send(port)
    await server.wait_for_termination()


async def _grpc_client(port: int, message: bytes, count: int) -> tuple[float, float]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = channel.stream_stream(METHOD)
        call = stub()

        async def round_trip() -> None:
            await call.write(message)
            await call.read()

        measured = await _timed(round_trip, count)
        call.cancel()
        return measured


class _Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def _tcp_server(ready: Connection, tls: ssl.SSLContext | None = None) -> None:
    server = await asyncio.get_running_loop().create_server(_Echo, "127.0.0.1", 0, ssl=tls)
    ready.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


class _Caller(asyncio.Protocol):
    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._missing = 0
        self._answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._missing -= len(data)
        if not self._missing and self._answered is not None:
            self._answered.set_result(None)

    async def round_trip(self, message: bytes) -> None:
        self._missing = self._num_bytes
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._answered

    def close(self) -> None:
        self._transport.close()


async def _tls_server(ready: Connection) -> None:
    await _tcp_server(ready, InternalTls(SEED).listener())


async def _tls_client(port: int, message: bytes, count: int) -> tuple[float, float]:
    return await _tcp_client(port, message, count, InternalTls(SEED).client())


async def _tcp_client(port: int, message: bytes, count: int, tls: ssl.SSLContext | None = None) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    name = None if tls is None else InternalTls.name
    _, caller = await loop.create_connection(
        lambda: _Caller(len(message)), "127.0.0.1", port, ssl=tls, server_hostname=name
    )
    measured = await _timed(lambda: caller.round_trip(message), count)
    caller.close()
    return measured


if __name__ == "__main__":
    main()
