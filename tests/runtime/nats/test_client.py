"""The connection to NATS, over a real server that goes away and comes back."""

import asyncio
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
from nats.js.api import StorageType, StreamConfig

from baton.service.local.nats_server import NatsServer
from runtime.errors import UnavailableError
from runtime.nats.client import NATS_ERRORS, NatsClient, connect
from runtime.security.cluster_key import NATS, ClusterKey
from runtime.security.nats_login import OWN_USER, NatsLogin
from runtime.security.secret import Secret
from tests.freezing import freeze
from tests.open_files import open_files

STREAM = StreamConfig(name="THINGS", subjects=["things.*"], allow_direct=True)


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[NatsClient]:
    client = await connect(nats_server.url, "test", timeout_s=60)
    yield client
    await client.close()


async def test_an_outage_is_told_and_subscriptions_survive_it(nats_server: NatsServer, client: NatsClient) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()
    away, back = asyncio.Event(), asyncio.Event()
    client.on_disconnect(away.set)
    client.on_reconnect(back.set)
    await client.subscribe("greetings", lambda subject, payload, headers: received.put_nowait(payload))

    await nats_server.kill()
    await asyncio.wait_for(away.wait(), 30)
    assert not client.connected
    await nats_server.start()
    await asyncio.wait_for(back.wait(), 30)
    assert client.connected

    await client.publish("greetings", b"hello again")
    assert await asyncio.wait_for(received.get(), 30) == b"hello again"


async def test_while_the_server_is_away_publishing_is_dropped_and_requests_fail_at_once(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.nats.client.REQUEST_TIMEOUT_S", 60.0)
    client = await connect(nats_server.url, "test", timeout_s=60)
    away = asyncio.Event()
    client.on_disconnect(away.set)
    await nats_server.kill()
    await asyncio.wait_for(away.wait(), 30)
    await client.publish("greetings", b"nobody hears this")
    started = time.monotonic()
    with pytest.raises(NATS_ERRORS):
        await client.publish_stored("things.a", b"")
    with pytest.raises(NATS_ERRORS):
        await client.flush(60.0)
    assert time.monotonic() - started < 60.0, "one of them would have taken as long"
    await client.close()


async def test_a_handler_that_raises_does_not_stop_the_messages_after_it(client: NatsClient) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()

    def handler(subject: str, payload: bytes, headers: dict[str, str]) -> None:
        if payload == b"bad":
            raise ValueError("cannot read this")
        received.put_nowait(payload)

    await client.subscribe("greetings", handler)
    await client.publish("greetings", b"bad")
    await client.publish("greetings", b"good")
    assert await asyncio.wait_for(received.get(), 30) == b"good"


async def test_ensuring_a_stream_twice_updates_its_limits(client: NatsClient) -> None:
    await client.ensure_stream(STREAM)
    await client.publish_stored("things.a", b"kept")
    await client.ensure_stream(STREAM)
    await client.ensure_stream(STREAM.evolve(max_age=60.0))
    info = await client.jetstream.stream_info("THINGS")
    assert info.config.max_age == 60.0
    assert info.state.messages == 1


async def test_stored_messages_are_found_by_subject_and_sequence(client: NatsClient) -> None:
    await client.ensure_stream(STREAM.evolve(storage=StorageType.MEMORY))
    for subject, payload in (("things.a", b"1"), ("things.b", b"2"), ("things.a", b"3")):
        await client.publish_stored(subject, payload)

    async def stored(subject: str, from_sequence: int | None = None) -> tuple[int | None, bytes | None] | None:
        message = await client.stored_message("THINGS", subject, from_sequence)
        return None if message is None else (message.seq, message.data)

    assert await stored("things.a") == (3, b"3")
    assert await stored("things.a", 1) == (1, b"1")
    assert await stored("things.a", 2) == (3, b"3")
    assert await stored("things.b", 3) is None
    assert await stored("things.c") is None


async def test_connecting_to_nobody_gives_up_when_the_time_is_up() -> None:
    with pytest.raises(UnavailableError, match="did not answer"):
        await connect("nats://127.0.0.1:1", "test", timeout_s=0.3)


async def test_a_server_that_hangs_up_before_its_greeting_costs_no_descriptors(
    nats_server: NatsServer, client: NatsClient
) -> None:
    hung_up: asyncio.Queue[None] = asyncio.Queue()

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        hung_up.put_nowait(None)

    back = asyncio.Event()
    client.on_reconnect(back.set)
    before = open_files()
    await nats_server.kill()
    async with await asyncio.start_server(hang_up, "127.0.0.1", urlsplit(nats_server.url).port):
        for _ in range(4):
            await asyncio.wait_for(hung_up.get(), 30)
    await nats_server.start()
    await asyncio.wait_for(back.wait(), 30)
    opened = [name for _, name in open_files() - before if name.startswith("socket")]
    assert len(opened) <= 1, opened


async def test_closing_while_the_server_is_away_leaves_no_task_behind(nats_server: NatsServer) -> None:
    client = await connect(nats_server.url, "test", timeout_s=60)
    away = asyncio.Event()
    client.on_disconnect(away.set)
    await client.subscribe("greetings", lambda subject, payload, headers: None)
    await nats_server.kill()
    await asyncio.wait_for(away.wait(), 30)
    await client._client.publish("greetings", b"stays in the library's buffer")
    await client.close()
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("connected", [True, False])
async def test_a_connection_with_tls_is_closed_though_its_server_is_frozen(connected: bool) -> None:
    key = ClusterKey(Secret("k" * 64), "on")
    login = NatsLogin(OWN_USER, key.derive(NATS), tls=key.tls)
    server = NatsServer(login=login)
    await server.start()
    before = open_files()
    client = await connect(server.url, "test", timeout_s=60, login=login)
    if not connected:
        await server.kill()
        await server.start()
    freeze(server.pid)
    try:
        await asyncio.wait_for(client.close(), 20)  # the end of TLS would be waited for for 30 s
        assert not [name for _, name in open_files() - before if name.startswith("socket")]
    finally:
        await server.kill()
        await server.stop()
