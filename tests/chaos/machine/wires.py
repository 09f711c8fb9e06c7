"""Hosts without root: loopback addresses, between which every connection goes over a wire that this process holds.

wire.c leads the connections here. A wire delays, stalls and breaks what goes over it. It carries TCP, and a lost packet
is what TCP makes of it: bytes that come late, by one time-out of retransmission or by several.
"""

import asyncio
import contextlib
import ipaddress
import mmap
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.machine.hosts import FIRST_HOST, Host
from tests.chaos.machine.preload import compiled
from tests.chaos.machine.slots import slot

TARGET = struct.Struct("=4sHH")  # address, port: as on the network
TABLE_BYTES = TARGET.size * 65536
CHUNK_BYTES = 1 << 18
RETRANSMISSION_S = 0.2  # of Linux; each further one takes twice as long
MOST_RETRANSMISSIONS = 3
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: close() sends RST


@dataclass
class Weather:
    """`loss`: the part of all chunks that is lost. `delay_s`: least and most."""

    loss: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    fair: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: the wire is cut

    def __post_init__(self) -> None:
        self.fair.set()

    async def passed(self) -> None:
        """When a chunk has come through."""
        delay_s = random.uniform(*self.delay_s)
        for lost in range(MOST_RETRANSMISSIONS):
            if random.random() >= self.loss:
                break
            delay_s += RETRANSMISSION_S * 2**lost
        if delay_s:
            await asyncio.sleep(delay_s)
        await self.fair.wait()


@dataclass(frozen=True, slots=True)
class WiredHost(Host):
    """A loopback address, and the weather on its wire."""

    weather: Weather = field(default_factory=Weather, compare=False)
    wires: set[asyncio.StreamWriter] = field(default_factory=set, compare=False)

    def cable(self, state: str) -> None:
        self.weather.fair.set() if state == "up" else self.weather.fair.clear()

    def lose(self, part: float) -> None:
        self.weather.loss = part

    def delay(self, least_s: float, most_s: float) -> None:
        self.weather.delay_s = (least_s, most_s)

    def reset(self) -> None:
        """Breaks every connection to and from this host, without a goodbye."""
        for writer in list(self.wires):
            broken(writer)


def broken(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


@asynccontextmanager
async def wired_hosts(count: int, folder: Path) -> AsyncIterator[list[Host]]:
    library, net = compiled("wire", folder), f"127.77.{slot()}"
    hosts: dict[str, WiredHost] = {}
    tables: dict[str, mmap.mmap] = {}
    relays: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address, port = writer.get_extra_info("peername")[:2]
        packed, target_port, _ = TARGET.unpack_from(tables[address], port * TARGET.size)
        target = str(ipaddress.ip_address(packed))
        task = asyncio.current_task()
        assert task is not None
        relays.add(task)
        try:
            await _relay(hosts[address], hosts[target], socket.ntohs(target_port), reader, writer)
        finally:
            relays.discard(task)

    server = await asyncio.start_server(accepted, f"{net}.1", 0, backlog=512, limit=CHUNK_BYTES)
    wire_port = str(server.sockets[0].getsockname()[1])
    for number in range(count):
        address, table = f"{net}.{FIRST_HOST + number}", folder / f"host-{number}.table"
        table.write_bytes(bytes(TABLE_BYTES))
        with table.open("r+b") as file:
            tables[address] = mmap.mmap(file.fileno(), TABLE_BYTES)
        variables = {
            "LD_PRELOAD": str(library),
            "BATON_WIRE_TABLE": str(table),
            "BATON_WIRE_HOST": address,
            "BATON_WIRE_PORT": wire_port,
        }
        hosts[address] = WiredHost(address, variables=variables)
    try:
        yield list(hosts.values())
    finally:
        server.close()
        for task in list(relays):
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _relay(
    here: WiredHost, there: WiredHost, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    ends, in_order = [writer], False
    try:
        await here.weather.fair.wait()
        await there.weather.fair.wait()
        local = (here.address, 0)
        far_reader, far_writer = await asyncio.open_connection(there.address, port, local_addr=local, limit=CHUNK_BYTES)
        ends.append(far_writer)
        for host in (here, there):
            host.wires.update(ends)
        async with asyncio.TaskGroup() as group:
            group.create_task(_carry(reader, far_writer, here, there))
            group.create_task(_carry(far_reader, writer, there, here))
        in_order = True
    except* OSError:
        pass  # one end has broken off, and so does the other one now
    finally:
        for end in ends:
            end.close() if in_order else broken(end)
        for host in (here, there):
            host.wires.difference_update(ends)


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, *hosts: WiredHost) -> None:
    while data := await source.read(CHUNK_BYTES):
        for host in hosts:
            await host.weather.passed()
        sink.write(data)
        await sink.drain()
    for host in hosts:
        await host.weather.passed()
    sink.write_eof()
