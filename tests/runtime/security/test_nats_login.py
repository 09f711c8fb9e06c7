"""Real NATS servers that ask for a login, and what becomes of who has none."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from baton.service.local.nats_server import NatsServer
from runtime.config.surroundings import NatsConfig
from runtime.errors import UnauthorizedError
from runtime.nats.client import connect
from runtime.security.nats_login import NO_LOGIN, NatsLogin, find_login
from runtime.security.secret import Secret
from tests.runtime.security.nats_accounts import hosted_nats

LOGIN = NatsLogin("baton", Secret("hush hush"))


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(store_dir=tmp_path / "nats", login=LOGIN)
    await server.start()
    yield server
    await server.stop()


async def test_our_own_server_takes_its_login_and_keeps_it_when_it_is_started_again(server: NatsServer) -> None:
    client = await connect(server.url, "test", timeout_s=60, login=LOGIN)
    await server.restart()
    await client.wait_connected()
    await client.flush()
    await client.close()


async def test_a_login_in_the_url_is_taken_too(server: NatsServer) -> None:
    client = await connect(server.url.replace("//", "//baton:hush%20hush@"), "test", timeout_s=60)
    await client.close()


@pytest.mark.parametrize("login", [NO_LOGIN, NatsLogin("baton", Secret("wrong")), NatsLogin(token=Secret("hush hush"))])
async def test_who_is_refused_hears_it_at_once_and_what_to_do(server: NatsServer, login: NatsLogin) -> None:
    with pytest.raises(UnauthorizedError, match=f"NATS at {server.url} refuses us: .*BATON_CLUSTER_KEY"):
        await connect(server.url, "test", login=login)


async def test_one_refusal_as_of_a_server_that_reads_its_configuration_again_is_not_final(server: NatsServer) -> None:
    refusals = 0

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(4096):
                writer.write(data)

    async def door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal refusals
        inner, outer = await asyncio.open_connection(server.host, server.port)
        if refusals == 0:
            refusals += 1
            writer.write(await inner.readline())
            await reader.readline()  # its login
            writer.write(b"-ERR 'Authorization Violation'\r\n")
            writer.close()
            outer.close()
        else:
            await asyncio.gather(forward(reader, outer), forward(inner, writer), return_exceptions=True)

    async with await asyncio.start_server(door, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        client = await connect(f"nats://{host}:{port}", "test", timeout_s=60, login=LOGIN)
        await client.flush()
        await client.close()
    assert refusals == 1


async def test_a_refusal_does_not_show_the_login(server: NatsServer) -> None:
    with pytest.raises(UnauthorizedError) as caught:
        await connect(server.url.replace("//", "//baton:wr0ng@"), "test")
    assert "wr0ng" not in str(caught.value)


async def test_the_login_stands_in_a_file_that_only_we_can_read_and_on_no_command_line(server: NatsServer) -> None:
    command = psutil.Process(server.pid).cmdline()
    assert "hush hush" not in " ".join(command)
    config = Path(command[command.index("--config") + 1])
    assert "hush hush" in config.read_text()
    assert (config.stat().st_mode & 0o777, config.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    await server.stop()
    assert not config.exists()


async def test_a_creds_file_opens_a_hosted_server(tmp_path: Path) -> None:
    with hosted_nats(tmp_path) as url:
        login = find_login(NatsConfig(url=url, credentials_file=str(tmp_path / "user.creds")), None, {})
        client = await connect(url, "test", timeout_s=60, login=login)
        await client.flush()
        await client.close()
        with pytest.raises(UnauthorizedError):
            await connect(url, "test", login=LOGIN)
