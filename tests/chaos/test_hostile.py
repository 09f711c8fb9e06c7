"""The attacks: each reaches a service, in the form that its stranger can give it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.hostile.attacks import ATTACKS, BY_NAME, Attack
from tests.chaos.hostile.stranger import COUNTED, Stranger, Who
from tests.fuzz.doors.http2_frames import PREFACE

LIMIT_S = 20.0
ANSWER = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"


class Heard:
    """A service that says the same to everybody. `heard`: the first bytes of each connection."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()
        self.address = ("", 0)
        self._server: asyncio.Server | None = None
        self._visits: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = self._server.sockets[0].getsockname()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.current_task()
        assert visit is not None
        self._visits.add(visit)
        try:
            self.heard.put_nowait(await reader.read(4096))
            writer.write(ANSWER)
            while await reader.read(65536):
                pass
        except OSError:  # it has gone
            pass
        finally:
            writer.transport.abort()
            self._visits.discard(visit)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        while self._visits:  # who has attacked has gone
            await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.fixture
async def service() -> AsyncIterator[Heard]:
    service = Heard()
    await service.start()
    yield service
    await service.close()


CASES = [pytest.param(attack, who, id=f"{attack.name} by {who}") for attack in ATTACKS for who in attack.by]


@pytest.mark.parametrize(("attack", "who"), CASES)
async def test_an_attack_reaches_the_service(service: Heard, attack: Attack, who: Who) -> None:
    COUNTED.clear()
    async with attacking(attack, Stranger(who, "the key", service.address, service.address)):
        if attack.name == "idle connections":  # which say nothing
            await until_counted("connections")
            first = b""
        else:
            first = await asyncio.wait_for(service.heard.get(), LIMIT_S)
    if b"\r\n" in first and not first.startswith(PREFACE):  # else slow, or for gRPC
        assert (b"\r\nAuthorization: Bearer the key\r\n" in first) == (who == "user")
        assert (b"\r\nOrigin: https://page.example\r\n" in first) == (who == "page")


async def test_what_comes_of_an_attack_is_counted(service: Heard) -> None:
    COUNTED.clear()
    async with attacking(BY_NAME["bad keys"], Stranger("nobody", "", service.address, service.address)):
        await until_counted("429")


@asynccontextmanager
async def attacking(attack: Attack, stranger: Stranger) -> AsyncIterator[None]:
    work = asyncio.create_task(attack.work(stranger))
    try:
        yield
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


async def until_counted(what: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not COUNTED[what]:
            await asyncio.sleep(0)
