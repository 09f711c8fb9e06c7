"""The NATS server that Baton starts itself."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from baton.service.nats_server import NatsServer
from runtime.errors import ConfigError, UnavailableError
from runtime.nats.client import connect


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


async def test_the_server_dies_with_a_process_that_is_killed() -> None:
    program = textwrap.dedent("""
        import asyncio
        from baton.service.nats_server import NatsServer

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
