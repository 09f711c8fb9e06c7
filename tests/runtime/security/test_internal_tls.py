"""TLS between the processes of a service: who is let in, when it is on, and that certificates are renewed while servers
and clients live."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.service.local import nats_server
from baton.service.local.nats_server import NatsServer
from baton_proto import worker as wire
from runtime.calls.worker import WorkerClient
from runtime.config.serving import parse_config
from runtime.config.surroundings import NatsConfig
from runtime.errors import ConfigError, UnauthorizedError, UnavailableError, WorkerLostError
from runtime.nats.client import connect
from runtime.security.cluster_key import ClusterKey, new_cluster_key
from runtime.security.internal_tls import LIFETIME, InternalTls
from runtime.security.keys import load_keys, load_or_make_keys, tls_mode
from runtime.security.nats_login import NO_LOGIN, NatsLogin, find_login
from runtime.security.secret import Secret
from runtime.streams.message_stream import accept_streams, dial

SEED = bytes(range(32))
TEXT = "k" * 40


class Clock:
    def __init__(self) -> None:
        self.time = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.time

    def advance(self, by: timedelta) -> None:
        self.time += by


def key(seed: bytes = SEED, clock: Clock | None = None) -> ClusterKey:
    made = ClusterKey(Secret(seed.hex()), "on")
    made.tls = InternalTls(seed, clock or Clock())
    return made


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"welcome")
    writer.close()


@asynccontextmanager
async def tls_server(context: ssl.SSLContext) -> AsyncIterator[int]:
    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def shown(port: int, tls: InternalTls) -> tuple[str, datetime]:
    """Serial number and end of the certificate that the server shows."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls.client(), server_hostname=tls.name)
    certificate: dict[str, Any] = writer.get_extra_info("peercert")
    assert await reader.read() == b"welcome"
    writer.close()
    await writer.wait_closed()
    end_s = ssl.cert_time_to_seconds(certificate["notAfter"])
    return certificate["serialNumber"], datetime.fromtimestamp(end_s, UTC)


async def test_processes_with_one_key_trust_each_other_though_none_has_sent_the_other_a_file() -> None:
    async with tls_server(InternalTls(SEED).listener()) as port:
        await shown(port, InternalTls(SEED))


async def test_another_key_is_another_ca() -> None:
    async with tls_server(InternalTls(SEED).listener()) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(port, InternalTls(bytes(32)))


async def test_who_shows_no_certificate_is_not_served_where_one_is_asked_for() -> None:
    ours = InternalTls(SEED)
    trusting = ssl.create_default_context(cadata=ours.authority.decode())

    async def visit(context: ssl.SSLContext) -> bytes:
        async with tls_server(context) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname=ours.name)
            try:
                return await reader.read()
            except OSError:
                return b""
            finally:
                writer.close()

    assert await visit(ours.listener()) == b""
    assert await visit(ours.listener(ask=False)) == b"welcome"


async def test_a_listener_shows_a_renewed_certificate_though_nobody_has_touched_it() -> None:
    clock = Clock()
    client, server = InternalTls(SEED), InternalTls(SEED, clock)
    async with tls_server(server.listener()) as port:
        first, end = await shown(port, client)
        assert await shown(port, client) == (first, end)
        clock.advance(LIFETIME / 2)
        second, later = await shown(port, client)
        assert second != first
        assert later == end + LIFETIME / 2


@pytest.mark.parametrize("step", [timedelta(days=30), -timedelta(days=30)], ids=["asleep for a month", "set back"])
async def test_a_clock_that_jumps_does_not_part_processes_whose_clocks_agree(step: timedelta) -> None:
    clock = Clock()
    clock.advance(-step)  # where the certificates begin; the present is the time that OpenSSL knows
    client, server = InternalTls(SEED, clock), InternalTls(SEED, clock)
    async with tls_server(server.listener()) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(port, client)
        clock.advance(step)
        await shown(port, client)


async def test_a_stream_says_what_to_do_when_the_other_end_is_of_another_cluster_or_without_tls() -> None:
    ours = key()
    secured = await accept_streams("127.0.0.1", 0, lambda stream: stream.close(), key(bytes(32)).tls)
    plain = await accept_streams("127.0.0.1", 0, lambda stream: stream.close())
    for server in (secured, plain):
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(UnauthorizedError, match=r"decode-0 refuses us: security\.internal_tls and the cluster key"):
            await dial(address, "decode-0", ours.tls)
        server.close()


@asynccontextmanager
async def worker_service(tls: InternalTls) -> AsyncIterator[str]:
    """Answers `inspect` with the serial number of the client's certificate as the worker's id."""
    peers: list[str] = []

    async def inspect(request: wire.InspectRequest, context: Any) -> wire.DrainReport:
        peers.append(context.auth_context()["x509_pem_cert"][0])
        return wire.DrainReport(len(set(peers)))

    row = grpc.unary_unary_rpc_method_handler(inspect, wire.decoder(wire.DrainRequest), wire.encode)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, {wire.DRAIN.name: row}),))
    port = server.add_secure_port("127.0.0.1:0", tls.grpc_server())
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_questions_to_workers_go_on_while_both_certificates_are_renewed() -> None:
    clock, other = Clock(), Clock()
    async with (
        worker_service(InternalTls(SEED, other)) as address,
        WorkerClient("w", address, key(clock=clock)) as client,
    ):
        assert (await client.drain(5.0)).remaining == 1
        assert (await client.drain(5.0)).remaining == 1
        clock.advance(LIFETIME / 2)
        other.advance(LIFETIME / 2)
        assert (await client.drain(5.0)).remaining == 2, "the client shows its old certificate"


async def test_questions_of_another_cluster_are_not_answered() -> None:
    async with (
        worker_service(InternalTls(SEED)) as address,
        WorkerClient("w", address, key(bytes(32))) as client,
    ):
        with pytest.raises(WorkerLostError):
            await client.drain(0.1)


async def test_our_own_nats_takes_who_has_the_key_and_renews_without_losing_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_server, "RENEWAL_INTERVAL_S", 0.05)
    clock, cluster = Clock(), key()
    login = NatsLogin("baton", Secret("hush"), tls=InternalTls(SEED, clock))
    server = NatsServer(store_dir=tmp_path, login=login)
    await server.start()
    assert server.url.startswith("tls://127.0.0.1:")
    client = await connect(server.url, "first", timeout_s=60, login=NatsLogin("baton", Secret("hush"), tls=cluster.tls))
    before = certificate(server)
    clock.advance(LIFETIME / 2)
    while certificate(server) == before:
        await asyncio.sleep(0.05)
    later = await connect(server.url, "later", timeout_s=60, login=NatsLogin("baton", Secret("hush"), tls=cluster.tls))
    await client.flush()
    assert client.disconnects == 0
    stranger = NatsLogin("baton", Secret("hush"), tls=InternalTls(bytes(32)))
    for lacking in (stranger, NatsLogin("baton", Secret("hush"))):
        with pytest.raises(UnavailableError):
            await connect(server.url, "stranger", timeout_s=1, login=lacking)
    await client.close()
    await later.close()
    await server.stop()


def certificate(server: NatsServer) -> bytes:
    assert server._temporary_dir is not None
    return (Path(server._temporary_dir) / "cert.pem").read_bytes()


@pytest.mark.parametrize(
    ("hosts", "wanted", "mode"),
    [
        (("127.0.0.1", "::1"), "auto", "off"),
        (("127.0.0.1", "localhost"), True, "on"),
        (("0.0.0.0", "127.0.0.1"), "auto", "off"),  # the router's own ports have certificates of their own
        (("0.0.0.0", "0.0.0.0"), "auto", "auto"),
        (("127.0.0.1", "10.0.0.7"), "auto", "auto"),
        (("0.0.0.0", "0.0.0.0"), "off", "off"),
        (("0.0.0.0", "0.0.0.0"), False, "off"),
        (("0.0.0.0", "::"), "on", "on"),
    ],
)
def test_auto_is_on_as_soon_as_something_inside_listens_beyond_this_machine(
    hosts: tuple[str, str], wanted: str | bool, mode: str
) -> None:
    sections = {
        "router": {"host": hosts[0]},
        "workers": {"host": hosts[1]},
        "security": {"internal_tls": wanted, "insecure": True},
    }
    config = parse_config(sections)
    assert tls_mode(config) == mode
    keys = load_or_make_keys(config, {})
    assert keys.cluster is not None
    assert (keys.cluster.tls is None, keys.nats.tls is None) == (mode == "off", mode == "off")


def test_another_nats_keeps_its_own_certificate_and_with_on_has_to_have_one() -> None:
    cluster = new_cluster_key("on")
    assert find_login(NatsConfig(url="tls://nats.example:4222"), cluster, {}).tls is None
    assert find_login(NatsConfig(url="tls://me:mine@127.0.0.1:4222"), cluster, {}).tls is None
    assert find_login(NatsConfig(url="tls://127.0.0.1:4222"), cluster, {}).tls is cluster.tls
    with pytest.raises(ConfigError, match=r"nats\.url: security\.internal_tls is `on`, which wants tls://"):
        find_login(NatsConfig(url="nats://nats.example:4222"), cluster, {})
    with pytest.raises(ConfigError, match=r"nats\.url: .* `on`, .*; with `auto` a NATS at 127\.0\.0\.1 may do without"):
        find_login(NatsConfig(url="nats://127.0.0.1:4222"), cluster, {})
    assert find_login(NatsConfig(), None, {}) == NO_LOGIN


@pytest.mark.parametrize("url", ["nats://nats.example:4222", "nats://me:mine@10.0.0.7:4222", "nats.example:4222"])
def test_where_all_else_is_encrypted_a_nats_elsewhere_has_to_be(url: str) -> None:
    wide = {"workers": {"host": "0.0.0.0"}, "nats": {"url": url}}
    with pytest.raises(ConfigError, match=r"nats\.url: .*tls:// for a NATS on another machine .*; `off` sends all"):
        load_or_make_keys(parse_config(wide), {})
    with pytest.raises(ConfigError, match=r"nats\.url: "):
        load_keys(parse_config(wide), {"BATON_CLUSTER_KEY": TEXT})
    plain = load_or_make_keys(parse_config(wide | {"security": {"internal_tls": "off"}}), {})
    assert plain.nats.tls is None
    for here in ("nats://127.0.0.1:4222", "localhost:4222"):
        assert load_or_make_keys(parse_config(wide | {"nats": {"url": here}}), {}).nats.tls is None
    load_or_make_keys(parse_config({"nats": {"url": url}}), {})  # workers on this machine alone: nothing is encrypted


def test_on_without_a_cluster_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"security\.internal_tls: .*BATON_CLUSTER_KEY"):
        load_keys(parse_config({"security": {"internal_tls": "on"}}), {})
