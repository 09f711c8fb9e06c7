"""The HTTP server of a process's Prometheus metrics: one thread, which is the door's."""

import socket
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest

from runtime.address import format_address, is_loopback
from runtime.errors import ProtocolError
from runtime.security.bearer_keys import BearerKeys
from runtime.streams.door import Door, Talk, listen_tcp, received, sent
from runtime.streams.secured_socket import SecuredSocket

if TYPE_CHECKING:
    from runtime.security.internal_tls import InternalTls

REQUEST_TIMEOUT_S: Final = 5.0  # from the connection to the last byte of the answer
MAX_HEAD_BYTES: Final = 8192


class MetricsServer:
    """`keys`: a scraper has to show one of them; None: anybody may scrape. `tls`: beyond the loopback interface the
    server shows a certificate; it asks for none, because a scraper cannot make one."""

    def __init__(self, registry: CollectorRegistry, keys: BearerKeys | None, tls: "InternalTls | None" = None) -> None:
        self._tls = tls
        self._registry = registry
        self._keys = keys
        self._door: Door[None] | None = None

    def serve(self, host: str) -> str:
        """Returns HOST:PORT. Raises OSError."""
        listener = listen_tcp(host)
        address = format_address(host, listener.getsockname()[1])
        context = None if self._tls is None or is_loopback(host) else self._tls.listener(ask=False)

        def secured(sock: socket.socket) -> socket.socket:
            return sock if context is None else SecuredSocket(sock, context)

        self._door = Door(
            "metrics", [listener], self._answered, REQUEST_TIMEOUT_S, lambda sock, _: sock.close(), secured
        )
        return address

    def close(self) -> None:
        if self._door is not None:
            self._door.close(REQUEST_TIMEOUT_S)

    def _answered(self, sock: socket.socket) -> Talk[None]:
        head = b""
        while b"\r\n\r\n" not in head:
            if len(head) > MAX_HEAD_BYTES:
                raise ProtocolError("a scraper", f"sent a head of more than {MAX_HEAD_BYTES} bytes")
            head += yield from received(sock, MAX_HEAD_BYTES)
        request, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status, header, body = self._answer(request, fields)
        lengths = f"Content-Length: {len(body)}\r\nConnection: close"
        yield from sent(sock, f"HTTP/1.1 {status}\r\n{header}\r\n{lengths}\r\n\r\n".encode("latin-1") + body)

    def _answer(self, request: str, fields: dict[str, str]) -> tuple[str, str, bytes]:
        """Status, one line of the head, and body."""
        plain = "Content-Type: text/plain"
        if self._keys is not None and not self._keys.accepts(fields.get("authorization", "").encode("latin-1")):
            sentence = b"the metrics want an API key: Authorization: Bearer KEY\n"
            return "401 Unauthorized", f"WWW-Authenticate: Bearer\r\n{plain}", sentence
        if not request.startswith("GET "):
            return "405 Method Not Allowed", f"Allow: GET\r\n{plain}", b"the metrics are read by GET\n"
        return "200 OK", "Content-Type: text/plain; version=0.0.4; charset=utf-8", generate_latest(self._registry)
