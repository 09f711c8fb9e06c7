"""Keys on gRPC: `authorization: Bearer KEY` in a call's metadata, checked before the request is read."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from urllib.parse import unquote

import grpc

from runtime.security.bearer_keys import BearerKeys, bearer
from runtime.security.failed_logins import FailedLogins
from runtime.security.secret import Secret

HEADER: Final = "authorization"
HANDSHAKE_TIMEOUT_MS: Final = 10_000
MAX_STREAMS: Final = 128  # calls at once on one connection, with those that are given up and not yet taken by Python
LOOKAHEAD_BYTES: Final = 16 * 1024  # of a message that nobody reads yet
MAX_PENDING: Final = 64 * MAX_STREAMS  # calls of a method, over all connections, before Python takes them: 32 KiB each
MAX_HEAD_BYTES: Final = 16 * 1024  # of a call's metadata: names, values, and 32 bytes for each
SERVER_OPTIONS = [
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.http2.settings_timeout", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_metadata_size", MAX_HEAD_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_HEAD_BYTES),
    ("grpc.http.tarpit", 0),
    ("grpc.http2.max_requests_per_read", 1),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
    ("grpc.http2.bdp_probe", 0),
]
"""A connection without a TLS or HTTP/2 handshake, or whose client does not agree to these settings, is closed after
HANDSHAKE_TIMEOUT_MS. Until the client has agreed, gRPC takes heads of 16 MiB. By itself, gRPC refuses heads from 8 KiB
on at random, and holds what it refuses for up to a second (the tarpit), after the end of its connection, too, with
a message of 445 KB for a head of 16 KB that names a field again and again. Between two heads of a connection, what is
held of refused ones is given back: gRPC by itself reads 32 before that. With the probe, gRPC would raise
LOOKAHEAD_BYTES as fast as a client sends. Beyond max_pending_requests gRPC ends calls at random, and beyond the hard
limit all, with CANCELLED and without a word. A call that its client has given up is pending until Python takes it, so
one connection may have few: MAX_STREAMS is what keeps strangers from filling the places of honest callers."""

Metadata = Sequence[tuple[str, str]]
Handler = Any  # grpc.RpcMethodHandler[...]


def metadata(key: Secret | None) -> Metadata:
    """The metadata of calls that show this key."""
    return () if key is None else ((HEADER, bearer(key)),)


class RequireBearer(grpc.aio.ServerInterceptor):
    """Calls of methods below `prefix` without one of the keys end with UNAUTHENTICATED, except methods below a prefix
    in `open_to_all`. `what`: the name of the keys in messages. `remedy`: where a caller gets one, in words. `logins` is
    told of wrong keys."""

    def __init__(
        self,
        keys: BearerKeys,
        what: str,
        open_to_all: tuple[str, ...] = (),
        prefix: str = "/",
        remedy: str = "",
        logins: FailedLogins | None = None,
    ) -> None:
        self._keys = keys
        self._logins = logins or FailedLogins()
        self._what = what
        self._open_to_all = open_to_all
        self._prefix = prefix
        self._remedy = remedy
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(self._refuse)  # streams: no request is read

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        asked_for = details.method.startswith(self._prefix) and not details.method.startswith(self._open_to_all)
        if asked_for and not self._keys.accepts(_shown(details)):
            return self._refusal
        return await continuation(details)

    async def _refuse(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        given = any(name == HEADER for name, _ in context.invocation_metadata() or ())
        if given:
            await asyncio.sleep(self._logins.failed("grpc", self._what, _address(context.peer())))
        problem = f"this is not the {self._what}" if given else f"the {self._what} is missing"
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{problem} (metadata {HEADER}: Bearer KEY){self._remedy}")


def _address(peer: str) -> str:
    """The address in `ipv4:127.0.0.1:80` or `ipv6:%5B::1%5D:80`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _shown(details: grpc.HandlerCallDetails) -> bytes:
    for name, value in details.invocation_metadata or ():
        if name == HEADER:
            return value.encode() if isinstance(value, str) else value
    return b""
