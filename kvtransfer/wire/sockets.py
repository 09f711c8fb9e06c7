"""The sockets under KV connections: Unix within a host, where file descriptors travel along, and TCP."""

import os
import socket
import struct
from typing import Literal

from baton_proto.discovery import TransferEndpoint
from runtime.address import parse_address
from runtime.errors import ConfigError, ProtocolError
from runtime.security.cluster_key import ClusterKey
from runtime.security.handshake import TLS_ERRORS, tls_failure
from runtime.streams.door import in_time, shaken
from runtime.streams.secured_socket import SecuredSocket

SocketKind = Literal["unix", "tcp"]
STALL_TIMEOUT_S = 10.0  # a peer that takes or answers nothing for this long is given up
BACKLOG = 64
MAX_UNIX_PATH_BYTES = 107


def kind_of(sock: socket.socket) -> SocketKind:
    return "unix" if sock.family == socket.AF_UNIX else "tcp"


def connect(kind: SocketKind, endpoint: TransferEndpoint, timeout_s: float) -> socket.socket:
    """A socket whose operations end after `timeout_s`. Raises OSError, or ProtocolError for a malformed address."""
    if kind == "tcp":
        try:
            address = parse_address(endpoint.tcp_address)
        except ValueError as error:
            raise ProtocolError("grant", str(error)) from error
        sock = socket.create_connection(address, timeout_s)
        tune(sock)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        limit_sending(sock, timeout_s)  # so connect() waits when the backlog is full; after settimeout() it would fail
        sock.connect(endpoint.unix_path)
        sock.settimeout(timeout_s)
    except BlockingIOError:
        sock.close()
        raise TimeoutError(f"{endpoint.unix_path} took no connection within {timeout_s:g} s") from None
    except BaseException:
        sock.close()
        raise
    return sock


def secured(sock: socket.socket, key: ClusterKey | None, *, dialing: bool = False) -> socket.socket:
    """The socket, with TLS where the key is for it and bytes could go to another machine; its handshake comes next."""
    if key is None or key.tls is None or kind_of(sock) == "unix":
        return sock
    tls = key.tls
    return SecuredSocket(sock, tls.client(), tls.name) if dialing else SecuredSocket(sock, tls.server())


def shake_hands(sock: socket.socket, peer: str, timeout_s: float) -> None:
    """The dialer's side of TLS, if the socket has TLS. Raises UnauthorizedError when TLS does not come about, OSError
    when that takes longer than `timeout_s`."""
    try:
        if isinstance(sock, SecuredSocket):
            in_time(sock, shaken(sock), timeout_s)
    except TLS_ERRORS as error:
        raise tls_failure(peer, error) from error


def listen_unix(path: str) -> socket.socket:
    """Raises OSError, and ConfigError when the path is too long."""
    if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        problem = (
            f"{path} is longer than the {MAX_UNIX_PATH_BYTES} bytes of a Unix socket's path: name a shorter folder"
        )
        raise ConfigError("TMPDIR", problem)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def tune(sock: socket.socket) -> None:
    """TCP: small messages leave at once, and a host that vanished is noticed though nobody sends."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_TIMEOUT_S * 1000))


def limit_sending(sock: socket.socket, timeout_s: float) -> None:
    """Makes a blocking send fail when the peer took nothing for `timeout_s`."""
    seconds = int(timeout_s)
    packed = struct.pack("ll", seconds, int((timeout_s - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)
