"""The certificate files of serving.yaml: what is refused, by which name, and what a client is told."""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from runtime.config.surroundings import SecurityConfig
from runtime.errors import ConfigError
from runtime.security.tls import Tls, load_tls


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    own, other = ca.issue_cert("baton.test"), ca.issue_cert("other.test")
    (folder / "cert").write_bytes(b"".join(pem.bytes() for pem in own.cert_chain_pems))
    own.private_key_pem.write_to_path(folder / "key")
    other.private_key_pem.write_to_path(folder / "other")
    (folder / "text").write_text("no certificate")
    return {name: str(folder / name) for name in ("cert", "key", "other", "text", "nothing")}


def test_without_files_there_is_no_tls() -> None:
    assert load_tls(SecurityConfig()) is None


def test_a_certificate_tells_what_it_is_for(files: dict[str, str]) -> None:
    tls = load_tls(SecurityConfig(tls_cert_file=files["cert"], tls_key_file=files["key"]))
    assert tls is not None
    assert tls.name == "baton.test"
    assert tls.certificate == Path(files["cert"]).read_bytes()


@pytest.mark.parametrize(
    ("cert", "key", "field", "problem"),
    [
        ("cert", None, "tls_key_file", "is needed too"),
        (None, "key", "tls_cert_file", "is needed too"),
        ("nothing", "key", "tls_cert_file", "No such file"),
        ("cert", "nothing", "tls_key_file", "No such file"),
        ("text", "key", "tls_cert_file", "no certificate in PEM form"),
        ("key", "key", "tls_cert_file", "no certificate in PEM form"),
        ("cert", "text", "tls_key_file", "no key in PEM form"),
        ("cert", "other", "tls_key_file", "not that of the certificate"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    files: dict[str, str], cert: str | None, key: str | None, field: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tls(SecurityConfig(tls_cert_file=cert and files[cert], tls_key_file=key and files[key]))
    assert caught.value.where == f"security.{field}"
    assert problem in caught.value.problem


def test_a_certificate_that_has_expired_is_refused(tmp_path: Path) -> None:
    expired = trustme.CA().issue_cert("baton.test", not_after=datetime.now(UTC) - timedelta(days=1))
    (tmp_path / "cert").write_bytes(b"".join(pem.bytes() for pem in expired.cert_chain_pems))
    expired.private_key_pem.write_to_path(tmp_path / "key")
    with pytest.raises(ConfigError, match=r"security\.tls_cert_file: .*expired"):
        load_tls(SecurityConfig(tls_cert_file=str(tmp_path / "cert"), tls_key_file=str(tmp_path / "key")))


async def serve_http(tls: Tls) -> tuple[int, Callable[[], Any]]:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls.server_context())
    return server.sockets[0].getsockname()[1], server.close


async def serve_grpc(tls: Tls) -> tuple[int, Callable[[], Any]]:
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", tls.grpc_server_credentials())
    await server.start()
    return port, lambda: server.stop(None)


@pytest.mark.parametrize("serve", [serve_http, serve_grpc])
async def test_a_renewed_certificate_is_shown_without_a_restart_and_a_broken_one_is_not(
    tmp_path: Path, serve: Callable[[Tls], Awaitable[tuple[int, Callable[[], Any]]]]
) -> None:
    ca = trustme.CA()
    trust = ssl.create_default_context()
    ca.configure_trust(trust)
    trust.set_alpn_protocols(["h2", "http/1.1"])
    cert, key = tmp_path / "cert", tmp_path / "key"

    async def shown(port: int) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname="baton.test")
        certificate: dict[str, Any] = writer.get_extra_info("peercert")
        writer.close()
        return str(certificate["serialNumber"])

    def renew() -> trustme.LeafCert:
        own = ca.issue_cert("baton.test")
        cert.write_bytes(b"".join(pem.bytes() for pem in own.cert_chain_pems))
        own.private_key_pem.write_to_path(key)
        return own

    renew()
    tls = load_tls(SecurityConfig(tls_cert_file=str(cert), tls_key_file=str(key)))
    assert tls is not None
    port, close = await serve(tls)
    first = await shown(port)
    second_cert = renew()
    second = await shown(port)
    assert second != first
    assert tls.certificate == b"".join(pem.bytes() for pem in second_cert.cert_chain_pems)
    cert.write_text("half of a certif")
    assert await shown(port) == second
    key.unlink()
    assert await shown(port) == second
    renew()
    assert await shown(port) not in (first, second)
    if (closing := close()) is not None:
        await closing
