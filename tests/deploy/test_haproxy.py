"""A real haproxy with deploy/haproxy.cfg before two routers that listen on two addresses of this machine."""

import asyncio
import json
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from baton.client.async_client import AsyncClient
from baton.service.launches import Launches
from runtime.calls.router import Client
from runtime.processes.process import Process
from runtime.security.keys import handed_on
from tests.deploy.folder import DEPLOY
from tests.service import Service, running_service

FAR, FAR_HOST = "router-far", "127.0.0.2"
WAIT_S = 60.0
TOKENS = 400
pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None or sys.platform != "linux", reason="haproxy is not here: apt-get install haproxy"
)


@asynccontextmanager
async def haproxy(folder: Path, service: Service, far: dict[str, str]) -> AsyncIterator[tuple[str, str]]:
    """HOST:PORT for HTTP and for gRPC."""
    near = service.supervisor.ready["router-1"].addresses
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    fronts = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    text = (DEPLOY / "haproxy.cfg").read_text()
    for was, now in (
        ("bind :8080", f"bind fd@{sockets[0].fileno()}"),
        ("bind :8081", f"bind fd@{sockets[1].fileno()}"),
        ("10.0.0.1:8000", near["http"]),
        ("10.0.0.2:8000", far["http"]),
        ("10.0.0.1:8001 proto h2 port 8000", f"{near['grpc']} proto h2 port {near['http'].rpartition(':')[2]}"),
        ("10.0.0.2:8001 proto h2 port 8000", f"{far['grpc']} proto h2 port {far['http'].rpartition(':')[2]}"),
    ):
        assert was in text
        text = text.replace(was, now)
    config = folder / "haproxy.cfg"
    config.write_text(text)
    fds = [each.fileno() for each in sockets]
    process = await asyncio.create_subprocess_exec("haproxy", "-db", "-f", config, pass_fds=fds)
    try:
        yield fronts[0], fronts[1]
    finally:
        process.kill()
        await process.wait()
        for each in sockets:
            each.close()


async def far_router(service: Service, addresses: dict[str, str] | None = None) -> Process:
    """Another router of the service, on another address, as on another machine."""
    supervisor = service.supervisor
    launch = Launches(service.config, handed_on(supervisor.keys, {}), supervisor.children).router(FAR)
    router = msgspec.structs.replace(service.config.router, host=FAR_HOST)
    config = msgspec.structs.replace(service.config, router=router)
    launch = msgspec.structs.replace(launch, config=config, addresses=addresses or {})
    process = supervisor.launcher.process(launch)
    await process.start()
    return process


async def until_asked(grpc: str, router_id: str, service: Service) -> None:
    """Until haproxy gives a new connection to this router."""
    (operator_key,) = service.supervisor.keys.operator
    while True:
        async with Client(grpc, operator_key=operator_key) as client:
            if (await client.status(WAIT_S)).router_id == router_id:
                return


async def ask(front: str, stop: asyncio.Event) -> int:
    """OpenAI's client, which asks again after a 502, as haproxy says where a router dies that has not yet read the
    request. Returns the number of answers."""
    answered = 0
    while not stop.is_set():
        async with openai.AsyncOpenAI(base_url=f"http://{front}/v1", api_key="none", timeout=WAIT_S) as client:
            answer = await client.completions.create(model="mock", prompt="So?", max_tokens=3)
        assert answer.choices[0].finish_reason == "length"
        answered += 1
    return answered


async def stream(front: str, begun: asyncio.Event) -> int:
    """Reads a stream to its end, and where it breaks off goes on behind the last event; after a 502 as `ask` does.
    Returns its tokens."""
    body = {"prompt": [1, 2, 3], "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    headers, tokens, whole = {"accept": "text/event-stream"}, 0, False
    while not whole:
        with suppress(httpx.RemoteProtocolError):
            async with (
                httpx.AsyncClient(timeout=WAIT_S) as http,
                http.stream("POST", f"http://{front}/v1/completions", json=body, headers=headers) as answer,
            ):
                if answer.status_code == 502:
                    continue
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "id":
                        headers["last-event-id"] = value
                        begun.set()
                    whole = whole or value == "[DONE]"
                    if name == "data" and not whole:
                        tokens += sum(len(choice["token_ids"]) for choice in json.loads(value)["choices"])
    return tokens


async def by_client(front: str, begun: asyncio.Event) -> int:
    async with AsyncClient(front) as client, client.stream([1, 2, 3], max_tokens=TOKENS, ignore_eos=True) as pieces:
        async for _ in pieces:
            begun.set()
        return len(pieces.answer.token_ids)


async def test_routers_behind_haproxy_die_and_leave_and_no_request_fails(tmp_path: Path) -> None:
    async with running_service("mock", 0, 2, router={"drain_window_s": 3.0}) as service, asyncio.timeout(WAIT_S):
        far = await far_router(service)
        addresses = (await far.wait_ready(WAIT_S)).addresses
        async with haproxy(tmp_path, service, addresses) as (http, grpc):
            await until_asked(grpc, FAR, service)
            async with asyncio.TaskGroup() as group:
                stop, begun = asyncio.Event(), [asyncio.Event() for _ in range(8)]
                asking = [group.create_task(ask(http, stop)) for _ in range(6)]
                streams = [group.create_task(stream(http, each)) for each in begun[:4]]
                streams += [group.create_task(by_client(grpc, each)) for each in begun[4:]]
                await asyncio.gather(*(each.wait() for each in begun))
                far.send_signal(signal.SIGKILL)
                assert await asyncio.gather(*streams) == [TOKENS] * 8
                far = await far_router(service, addresses)
                await far.wait_ready(WAIT_S)
                await until_asked(grpc, FAR, service)
                service.kill("router-1", signal.SIGTERM)
                assert (await service.supervisor.wait()).name == "router-1"
                stop.set()
            assert min(await asyncio.gather(*asking)) > 0
            assert await far.stop(WAIT_S)
