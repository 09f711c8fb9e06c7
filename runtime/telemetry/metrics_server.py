"""The HTTP server of a process's Prometheus metrics, in threads of its own."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from runtime.address import format_address, is_loopback
from runtime.security.bearer_keys import BearerKeys

if TYPE_CHECKING:
    from runtime.security.internal_tls import InternalTls

SILENCE_TIMEOUT_S: Final = 5.0

log = structlog.get_logger()

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """`keys`: a scraper has to show one of them; None: anybody may scrape. `tls`: beyond the loopback interface the
    server shows a certificate; it asks for none, because a scraper cannot make one."""

    def __init__(self, registry: CollectorRegistry, keys: BearerKeys | None, tls: "InternalTls | None" = None) -> None:
        self._tls = tls
        app: WsgiApp = make_wsgi_app(registry)
        self._app = app if keys is None else _guarded(app, keys)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def serve(self, host: str) -> str:
        """Returns HOST:PORT. Raises OSError."""
        self._server = (_Ipv6Server if ":" in host else _Server)((host, 0), _Handler)
        self._server.set_app(self._app)
        if self._tls is not None and not is_loopback(host):
            self._server.tls = self._tls.listener(ask=False)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        return format_address(host, self._server.server_port)

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    tls: ssl.SSLContext | None = None

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, address = super().get_request()
        if self.tls is not None:  # the thread of the request shakes hands
            sock = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, address

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("metrics not told", client=client_address, exc_info=True)


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_TIMEOUT_S  # for who connects and asks nothing

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name)
        """Logs nothing: each scrape would be a line."""


def _guarded(app: WsgiApp, keys: BearerKeys) -> WsgiApp:
    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if keys.accepts(environ.get("HTTP_AUTHORIZATION", "").encode("latin-1")):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"the metrics want an API key: Authorization: Bearer KEY\n"]

    return guarded
