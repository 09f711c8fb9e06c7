"""TLS of the router's public ports: files of serving.yaml, contexts of servers and clients, and why a client finds no
service."""

import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from runtime.address import parse_address
from runtime.config.surroundings import SecurityConfig
from runtime.errors import ConfigError
from runtime.security.contexts import Pair, following, following_credentials
from runtime.security.secret import state_of

CERT_FIELD = "security.tls_cert_file"
KEY_FIELD = "security.tls_key_file"
PROBE_TIMEOUT_S = 3.0

log = structlog.get_logger()


class Tls:
    """A certificate with its chain, and its key, read again when their files have changed. Files that cannot be used
    are not taken; what they were before stays. Any thread."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        """Raises ConfigError naming the field whose file is missing or wrong."""
        self._files = (cert_file, key_file)
        self._lock = threading.Lock()
        self._states = self._look()
        self._loaded = _load(cert_file, key_file)

    @property
    def name(self) -> str:
        """A name that the certificate is for."""
        return self._current().name

    @property
    def certificate(self) -> bytes:
        return self._current().pair.certificate

    def server_context(self) -> ssl.SSLContext:
        """The context of the HTTP server."""
        return following(_server_context(self._current().pair), lambda: self._current().context)

    def grpc_server_credentials(self) -> grpc.ServerCredentials:
        return following_credentials(lambda: self._current().pair)

    def _current(self) -> "_Loaded":
        with self._lock:
            if (states := self._look()) != self._states:
                self._states = states
                try:
                    self._loaded = _load(*self._files)
                    log.info("certificate read again", name=self._loaded.name)
                except ConfigError as error:
                    log.warning("the certificate stays as it was", reason=str(error))
            return self._loaded

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [state_of(file) for file in self._files]


@dataclass(frozen=True, slots=True)
class _Loaded:
    pair: Pair
    name: str
    context: ssl.SSLContext


def load_tls(config: SecurityConfig) -> Tls | None:
    """Loads the files; None: the public ports use no TLS. Raises ConfigError naming the field whose file is missing or
    wrong."""
    cert_file, key_file = config.tls_cert_file, config.tls_key_file
    if cert_file is None and key_file is None:
        return None
    if cert_file is None or key_file is None:
        missing, given = (CERT_FIELD, KEY_FIELD) if cert_file is None else (KEY_FIELD, CERT_FIELD)
        raise ConfigError(missing, f"is needed too where {given} is given")
    return Tls(cert_file, key_file)


def _load(cert_file: str, key_file: str) -> _Loaded:
    """Raises ConfigError."""
    pair = Pair(_bytes(cert_file, CERT_FIELD), _bytes(key_file, KEY_FIELD))
    client = client_context(pair.certificate, CERT_FIELD, cert_file)
    try:
        server = _server_context(pair)
    except ssl.SSLError as error:
        why = "is no key in PEM form without a password, or not that of the certificate"
        raise ConfigError(KEY_FIELD, f"{key_file}: {why} ({error.reason})") from error
    return _Loaded(pair, _name(cert_file, client, server), server)


def _bytes(file: str, field: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(field, f"{file}: {error.strerror or error}") from error


def trusting(ca_file: str, field: str) -> ssl.SSLContext:
    """The context of a client that trusts the file's certificates. Raises ConfigError."""
    return client_context(_bytes(ca_file, field), field, ca_file)


def client_context(ca: bytes, field: str, path: object) -> ssl.SSLContext:
    """The context of a client that trusts `ca`, as gRPC clients do. Raises ConfigError when `ca` is no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trusts a certificate without its issuer
    try:
        context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))  # comments may be anything
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(field, f"{path}: holds no certificate in PEM form") from error
    return context


def tls_problem(address: str, trusting: ssl.SSLContext | None) -> str:
    """Why a client with the context `trusting` (None: without TLS) gets no answer at HOST:PORT; empty when TLS is not
    the reason. Connects there, for PROBE_TIMEOUT_S at most."""
    context = trusting or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if trusting is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        host, port = parse_address(address)
        with (
            socket.create_connection((host, port), PROBE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return "" if trusting is not None else f"{address} speaks TLS; name its CA with --ca-file or BATON_CA_FILE"
    except ssl.SSLCertVerificationError as error:
        return f"{address} shows a certificate that --ca-file does not vouch for: {error.verify_message}"
    except ssl.SSLError:
        return "" if trusting is None else f"{address} does not speak TLS; leave --ca-file and BATON_CA_FILE out"
    except (OSError, ValueError):
        return ""


def _server_context(pair: Pair) -> ssl.SSLContext:
    """Raises ssl.SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair.load_into(context)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _name(cert_file: str, client: ssl.SSLContext, server: ssl.SSLContext) -> str:
    """A name of the server in its certificate. A handshake within this process reads it and checks that the
    certificate is valid now. Raises ConfigError."""
    client.check_hostname = False
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        while True:
            try:
                ours.do_handshake()
                break
            except ssl.SSLWantReadError:
                _advance(theirs)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(CERT_FIELD, f"{cert_file}: {error.verify_message}") from error
    names: Any = (ours.getpeercert() or {}).get("subjectAltName", ())
    for kind, name in names:
        if kind in ("DNS", "IP Address"):
            return str(name).replace("*", "any")  # a name that the wildcard stands for
    raise ConfigError(CERT_FIELD, f"{cert_file}: is for no DNS name and no address (subjectAltName)")


def _advance(server: ssl.SSLObject) -> None:
    try:
        server.do_handshake()
    except ssl.SSLWantReadError:
        return
