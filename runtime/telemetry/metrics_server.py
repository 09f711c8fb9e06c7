"""The HTTP server of a process's Prometheus metrics, in threads of its own."""

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from runtime.address import format_address
from runtime.security.bearer_keys import BearerKeys

SILENCE_TIMEOUT_S: Final = 5.0

log = structlog.get_logger()

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer:
    """`keys`: a scraper has to show one of them; None: anybody may scrape."""

    def __init__(self, registry: CollectorRegistry, keys: BearerKeys | None) -> None:
        app: WsgiApp = make_wsgi_app(registry)
        self._app = app if keys is None else _guarded(app, keys)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    def serve(self, host: str) -> str:
        """Returns HOST:PORT. Raises OSError."""
        self._server = (_Ipv6Server if ":" in host else _Server)((host, 0), _Handler)
        self._server.set_app(self._app)
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
