"""What the machine lends to chaos: each of it works, or says why it does not."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.machine.clocks import Clock
from tests.chaos.machine.disk import Disk, why_no_small_disk
from tests.chaos.machine.limits import (
    lower_descriptors,
    lower_threads,
    raise_threads,
    why_no_limits,
    why_no_thread_limit,
)
from tests.chaos.machine.preload import why_no_preload
from tests.chaos.machine.slots import FIRST_PORT, MOST, PORTS_PER_SLOT, slot
from tests.chaos.machine.wires import WiredHost, wired_hosts

needs_preload = pytest.mark.skipif(bool(why_no_preload()), reason=why_no_preload() or "-")
TELL_TIME = "import sys, time\nfor line in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
ASK = """
import socket, sys
family, host, port = sys.argv[1:]
connection = socket.socket(getattr(socket, family))
connection.connect((host, int(port)))
print(connection.getsockname()[0], flush=True)
for line in sys.stdin:
    connection.sendall(line.encode())
    print(connection.recv(100).decode().strip(), flush=True)
"""


@needs_preload
def test_a_clock_jumps_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    clock = Clock(tmp_path, "one")
    command, environment = [sys.executable, "-c", TELL_TIME], {**os.environ, **clock.variables}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        seen = []
        for offset_s in (0, 3600, -3600, 0):
            clock.set(offset_s)
            process.stdin.write(b"\n")
            process.stdin.flush()
            seen.append([float(word) for word in process.stdout.readline().split()])
        process.stdin.close()
    days, monotonic = [one[0] for one in seen], [one[1] for one in seen]
    assert [round((day - days[0]) / 3600) for day in days] == [0, 1, -1, 0]
    assert monotonic == sorted(monotonic)


@pytest.mark.skipif(bool(why_no_limits()), reason=why_no_limits() or "-")
@pytest.mark.parametrize("seen", [False, True])
def test_a_process_that_has_just_ended_is_known_as_such_to_who_limits_its_descriptors(seen: bool) -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if seen:
        process.wait()
    with pytest.raises((ProcessLookupError, FileNotFoundError)):
        lower_descriptors(process.pid)
    process.wait()


@pytest.mark.skipif(bool(why_no_thread_limit()), reason=why_no_thread_limit() or "-")
@pytest.mark.parametrize("seen", [False, True])
def test_a_process_that_has_just_ended_gets_no_thread_limit(seen: bool) -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if seen:
        process.wait()
    lower_threads(process.pid)
    raise_threads(process.pid)
    process.wait()


class Asking:
    """A process on the first of two hosts, connected to an echo on the second."""

    def __init__(self, hosts: list[WiredHost], process: asyncio.subprocess.Process, peers: list[str]) -> None:
        self.hosts, self.process, self.peers = hosts, process, peers

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())

    async def heard(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()


@pytest.fixture(params=["AF_INET", "AF_INET6"])
async def asking(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Asking]:
    peers: list[str] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer.get_extra_info("peername")[0])
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async with wired_hosts(2, tmp_path) as hosts:
        here, there = [host for host in hosts if isinstance(host, WiredHost)]
        server = await asyncio.start_server(echo, there.address, 0)
        port = server.sockets[0].getsockname()[1]
        address = there.address if request.param == "AF_INET" else f"::ffff:{there.address}"
        command = [sys.executable, "-c", ASK, request.param, address, str(port)]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **here.variables},
        )
        one = Asking([here, there], process, peers)
        assert (await one.heard()).removeprefix("::ffff:") == here.address
        yield one
        if process.returncode is None:
            process.kill()
        await process.wait()
        server.close()


@needs_preload
async def test_what_goes_from_host_to_host_goes_over_a_wire_that_can_be_cut(asking: Asking) -> None:
    asking.say("one")
    assert await asking.heard() == "one"
    assert asking.peers == [asking.hosts[0].address]
    asking.hosts[1].cable("down")
    asking.say("two")
    hearing = asyncio.create_task(asking.heard())
    done, _ = await asyncio.wait({hearing}, timeout=0.2)
    assert not done, "a wire that is cut carries nothing"
    asking.hosts[1].cable("up")
    assert await hearing == "two"


@needs_preload
async def test_chunks_that_are_lost_or_late_arrive_in_order(asking: Asking) -> None:
    asking.hosts[0].lose(0.5)
    asking.hosts[1].delay(0.0, 0.02)
    for word in ("one", "two", "three"):
        asking.say(word)
        assert await asking.heard() == word


@needs_preload
async def test_a_wire_that_is_reset_breaks_the_connection_at_both_ends(asking: Asking) -> None:
    asking.say("one")
    assert await asking.heard() == "one"
    asking.hosts[1].reset()
    asking.say("two")
    assert await asking.heard() == "", "its recv() has failed, which ends it"
    assert await asking.process.wait() == 1


def test_two_processes_have_slots_of_their_own() -> None:
    command = [sys.executable, "-c", "from tests.chaos.machine.slots import slot; print(slot())"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(told) != slot()
    assert FIRST_PORT + MOST * PORTS_PER_SLOT < 32768, "where the kernel begins to give out ports"


@pytest.mark.skipif(bool(why_no_small_disk()), reason=why_no_small_disk() or "-")
def test_a_small_disk_is_full_and_then_empty_again(tmp_path: Path) -> None:
    with Disk(tmp_path / "disk") as disk:
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.folder / "more").write_bytes(bytes(1 << 16))
        disk.empty()
        (disk.folder / "more").write_bytes(bytes(1 << 16))


def test_limits_can_be_tried_or_say_why_not() -> None:
    assert isinstance(why_no_limits(), str)
    assert isinstance(why_no_thread_limit(), str)
