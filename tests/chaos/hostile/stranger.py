"""Who attacks, and over which wires: raw connections, because no client library sends what a stranger may send."""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

TIMEOUT_S = 30.0  # for one answer
PAUSE_S = 0.02  # after a connection that was refused or lost
FEW_BYTES = 2048  # of a receive buffer

Who = Literal["nobody", "user", "page"]
"""A caller without a key, one with a user's key, and a web page of another origin in a browser on this machine."""
COUNTED: Counter[str] = Counter()
"""What has come of the attack: connections that were made, and answers by their status."""
Lines = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class Stranger:
    who: Who
    key: str  # a user's
    http: tuple[str, int]
    grpc: tuple[str, int]

    def head(self, method: str, path: str, more: Mapping[str, str] | None = None) -> bytes:
        """Without the empty line at its end. A page sends what a browser lets it send without asking the service."""
        lines = {"Host": f"{self.http[0]}:{self.http[1]}", "Content-Type": "application/json"}
        if self.who == "user":
            lines["Authorization"] = f"Bearer {self.key}"
        if self.who == "page":
            lines |= {"Origin": "https://page.example", "Content-Type": "text/plain;charset=UTF-8"}
            lines |= {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Site": "cross-site"}
        lines |= more or {}
        return "\r\n".join(
            (f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items()), "")
        ).encode()

    def posted(self, path: str, body: bytes | Mapping[str, Any], more: Mapping[str, str] | None = None) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head("POST", path, {"Content-Length": str(len(data)), **(more or {})}) + b"\r\n" + data


@asynccontextmanager
async def connected(address: tuple[str, int], buffer_bytes: int = 0) -> AsyncIterator[Lines]:
    """`buffer_bytes`: what the system takes for who does not read."""
    sock = socket.socket()
    sock.setblocking(False)
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(sock, address)
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
    except BaseException:
        sock.close()
        raise
    COUNTED["connections"] += 1
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answered(reader: asyncio.StreamReader) -> int:
    """The status of one answer, of any form, which is read and dropped."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, lines = int(head[9:12]), head.lower()
    if b"chunked" in lines:
        while (size := int((await reader.readline()).split(b";")[0], 16)) > 0:
            await reader.readexactly(size + 2)
        await reader.readline()
    else:
        length = lines.partition(b"content-length:")[2].split(b"\r\n")[0]
        await reader.readexactly(int(length or 0))
    return status


async def again(address: tuple[str, int], requests: Iterator[bytes]) -> None:
    """Sends one after the other, and waits for each answer; connects again whenever the connection is lost."""
    while True:
        with contextlib.suppress(OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            async with connected(address) as (reader, writer):
                for data in requests:
                    writer.write(data)
                    async with asyncio.timeout(TIMEOUT_S):
                        await writer.drain()
                        COUNTED[str(await answered(reader))] += 1
        await asyncio.sleep(PAUSE_S)
