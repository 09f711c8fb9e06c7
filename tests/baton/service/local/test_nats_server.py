"""The NATS server that Baton starts itself."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from baton.service.local import nats_server
from baton.service.local.nats_server import HOST, NatsServer
from runtime.errors import ConfigError, UnavailableError
from runtime.nats.client import NATS_ERRORS, connect
from runtime.nats.library import StreamConfig
from runtime.processes.ports import free_port
from runtime.security.cluster_key import NATS as NATS_KEY, ClusterKey
from runtime.security.nats_login import OWN_USER, NatsLogin
from runtime.security.secret import Secret

STREAM = StreamConfig(name="THINGS", subjects=["things.*"], allow_direct=True)
DISABLED = "[ERR] JetStream out of resources, will be DISABLED"  # on a full disk
REFUSED = re.compile("(?i)authorization violation|authentication (error|failure)|tls.*handshake error")


async def test_a_started_server_takes_clients_and_keeps_streams_in_its_store_folder(tmp_path: Path) -> None:
    server = NatsServer(store_dir=tmp_path / "store")
    await server.start()
    client = await connect(server.url, "test", timeout_s=60)
    assert (await client.jetstream.account_info()).streams == 0
    assert server.store_dir == tmp_path / "store"
    await client.close()
    await server.stop()
    assert not server.alive


async def test_a_store_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(ConfigError, match=r"^nats\.store_dir: .*/store lets others write it \(mode 0777\): name one"):
        await NatsServer(store_dir=tmp_path / "store").start()


async def test_restart_keeps_the_port(nats_server: NatsServer) -> None:
    port, pid = nats_server.port, nats_server.pid
    await nats_server.restart()
    assert nats_server.port == port
    assert nats_server.pid != pid


async def test_a_temporary_store_folder_is_removed_by_stop() -> None:
    server = NatsServer()
    await server.start()
    folder = server.store_dir
    assert folder.is_dir()
    await server.stop()
    assert not folder.exists()
    await server.stop()  # idempotent


async def test_a_port_that_is_taken_is_refused_with_the_servers_own_words(nats_server: NatsServer) -> None:
    with pytest.raises(UnavailableError, match="address already in use"):
        await NatsServer(port=nats_server.port).start()


async def test_a_server_whose_log_cannot_be_written_serves_and_its_end_is_noticed() -> None:
    server = NatsServer(log_file=Path("/dev/full"))
    await server.start()
    try:
        os.kill(server.pid, signal.SIGKILL)
        assert (await asyncio.wait_for(server.wait(), 30)).returncode == -signal.SIGKILL
    finally:
        await server.stop()


async def test_a_server_that_stores_nothing_any_more_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it starts it again, with the words that it ended with."""
    said = "[INF] Listening for client connections on 127.0.0.1:4\n[INF] Server is ready\n" + DISABLED
    program = tmp_path / "nats-server"
    program.write_text(f"#!/bin/sh\ncat >&2 <<END\n{said}\nEND\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(nats_server, "find_binary", lambda: program)
    server = NatsServer(folder=tmp_path)
    await server.start()
    ended = await asyncio.wait_for(server.wait(), 30)
    assert (ended.returncode, ended.log_tail) == (-signal.SIGKILL, DISABLED)
    await server.stop()


async def test_the_server_dies_with_a_process_that_is_killed() -> None:
    program = textwrap.dedent("""
        import asyncio
        from baton.service.local.nats_server import NatsServer

        async def main():
            server = NatsServer()
            await server.start()
            print("SERVER", server.pid, server.store_dir.parent, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    while not (line := await parent.stdout.readline()).startswith(b"SERVER"):
        assert line, "the parent ended early"
    _, pid, folder = line.split()
    pidfd = os.pidfd_open(int(pid))
    exited = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, exited.set)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    try:
        await asyncio.wait_for(exited.wait(), 30)
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        subprocess.run(["rm", "-rf", folder], check=True)


def cluster_of_three(login: NatsLogin, folder: Path) -> list[NatsServer]:
    routes = [f"{HOST}:{free_port(HOST)}" for _ in range(3)]
    return [
        NatsServer(
            store_dir=folder / f"nats-{number}",
            log_file=folder / f"nats-{number}.log",
            login=login,
            routes=[routes[number], *routes[:number], *routes[number + 1 :]],
            name=f"nats-{number}",
        )
        for number in range(3)
    ]


async def until_taken(ask: Callable[[], Awaitable[object]]) -> None:
    """Again and again, while the servers choose who leads."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(*NATS_ERRORS):
                await ask()
                return
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_of_three_servers_any_may_die_and_lose_its_store_and_nothing_stored_is_lost(
    tmp_path: Path, secure: NatsLogin
) -> None:
    servers = cluster_of_three(secure, tmp_path)
    await asyncio.gather(*(server.start() for server in servers))
    client = await connect(",".join(server.url for server in servers), "test", timeout_s=60, login=secure)

    async def is_on_all() -> None:
        cluster = (await client.jetstream.stream_info("THINGS")).cluster
        assert cluster is not None
        if not all(peer.current for peer in cluster.replicas or ()):
            raise TimeoutError

    try:
        await until_taken(partial(client.ensure_stream, STREAM))
        await until_taken(partial(client.publish_stored, "things.first", b"1"))
        for server in servers:
            await server.kill()
            await until_taken(partial(client.publish_stored, f"things.{server.name}", b"2"))
            shutil.rmtree(server.store_dir)
            await server.start()
            await until_taken(is_on_all)
        first = await client.stored_message("THINGS", "things.first")
        assert first is not None
        assert first.data == b"1"
        assert await client.stored_sequences("THINGS") == range(1, 5)
    finally:
        await client.close()
        await asyncio.gather(*(server.stop() for server in servers))


async def test_a_server_with_another_key_does_not_join(tmp_path: Path, secure: NatsLogin) -> None:
    servers = cluster_of_three(secure, tmp_path)
    other = ClusterKey(Secret("w" * 64), "off")
    servers[2]._login = NatsLogin(OWN_USER, other.derive(NATS_KEY), tls=other.tls)
    await asyncio.gather(*(server.start() for server in servers))
    try:
        async with asyncio.timeout(60):
            while not REFUSED.search(servers[2]._log_file.read_text()):
                await asyncio.sleep(0.05)
        assert "JetStream cluster new metadata leader" not in servers[2]._log_file.read_text()
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


@pytest.fixture(params=["off", "on"])
def secure(request: pytest.FixtureRequest) -> NatsLogin:
    key = ClusterKey(Secret("k" * 64), request.param)
    return NatsLogin(OWN_USER, key.derive(NATS_KEY), tls=key.tls)
