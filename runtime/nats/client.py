"""A process's one connection to NATS. It outlives every outage: reconnecting never ends, subscriptions are kept.

The event, metrics and discovery planes go through it. While the server is away, a core publish is dropped, and a
JetStream publish or a request fails at once. Code that needs more keeps its own state and acts on `on_reconnect`.
"""

import asyncio
import contextlib
import copy
import ssl
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import structlog

from runtime.end_task import end_tasks
from runtime.errors import UnauthorizedError, UnavailableError
from runtime.nats.direct_get import StoredMessage, direct_get
from runtime.nats.library import (
    Client,
    JetStreamContext,
    Msg,
    PubAck,
    RawStreamMsg,
    Srv,
    StreamConfig,
    Subscription,
    js_errors,
    nats_errors,
)
from runtime.nats.skipped import skipped
from runtime.security.nats_login import NO_LOGIN, TLS_SCHEME, NatsLogin, each_url, split_url

if TYPE_CHECKING:
    from runtime.security.internal_tls import InternalTls

CONNECT_TIMEOUT_S = 2.0
RECONNECT_WAIT_S = 0.25
TELL_AFTER_S = 1.0  # whoever waits longer for the first connection says so
PING_INTERVAL_S = 5  # a frozen server is noticed after two intervals
REQUEST_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 2.0

LOGIN_REMEDY = (
    "the login is missing or wrong. It comes of BATON_CLUSTER_KEY, BATON_NATS_USER and BATON_NATS_PASSWORD, "
    "BATON_NATS_TOKEN or BATON_NATS_CREDENTIALS_FILE, or of serving.yaml"
)

STREAM_NAME_IN_USE = 10058  # error code of JetStream: a stream of that name exists with another configuration
NO_STORAGE = 10047  # error code of JetStream: a stream reserves its max_bytes, and the server has less
REPLICAS = 3
MIN_STREAM_BYTES = 8 * 1024 * 1024

# Errors of NATS that mean: not now, try again later.
NATS_ERRORS = (nats_errors.Error, TimeoutError, OSError)

T = TypeVar("T")

log = structlog.get_logger()


class _Client(Client):
    """nats-py with two changes. A connection that breaks before the server's greeting is closed; nats-py leaks it. And
    each connection to the service's own server shows the certificate of that moment."""

    internal: "InternalTls | None" = None

    @property
    def ssl_context(self) -> ssl.SSLContext:
        return super().ssl_context if self.internal is None else self.internal.client()

    async def _connect_to_server(self, s: Srv) -> None:
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)


class NatsClient:
    """`connect` makes it. Invariant: only the event loop that connected calls its methods."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self.namespace = namespace  # of all subjects, streams and buckets (runtime/nats/subjects.py)
        self._client = _Client()
        self._jetstream = JetStreamContext(self._client, timeout=REQUEST_TIMEOUT_S)
        self._connected = asyncio.Event()
        self.disconnects = 0  # connections that were lost
        self.problem = "no answer"  # of the last attempt to connect
        self._closing = False
        self._servers = 1  # that we were told of
        self._refusals = 0  # by the server, at the first connect
        self._refused = asyncio.Event()
        self._requests: set[asyncio.Future[Any]] = set()
        self._on_disconnect: list[Callable[[], None]] = []
        self._on_reconnect: list[Callable[[], None]] = []

    def within(self, namespace: str) -> Self:
        """This connection for another namespace. Who has connected closes it, and counts its disconnects."""
        if namespace == self.namespace:
            return self
        other = copy.copy(self)
        other.namespace = namespace
        return other

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    @property
    def jetstream(self) -> JetStreamContext:
        return self._jetstream

    async def wait_connected(self) -> None:
        await self._connected.wait()

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """`callback` runs on the event loop when the connection is lost. It must not block."""
        self._on_disconnect.append(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """`callback` runs on the event loop after a reconnect, with all subscriptions renewed. It must not block."""
        self._on_reconnect.append(callback)

    async def publish(self, subject: str, payload: bytes) -> None:
        """Core NATS: delivered at most once; dropped while the server is away."""
        if not self.connected:
            return
        try:
            await self._client.publish(subject, payload)
        except NATS_ERRORS as error:
            log.debug("publish dropped", subject=subject, error=str(error))

    async def subscribe(self, subject: str, handler: Callable[[str, bytes, dict[str, str]], None]) -> Subscription:
        """Calls `handler(subject, payload, headers)` for each message, in order, also after outages. An error of the
        handler is logged, and the next message follows."""

        async def receive(message: Msg) -> None:
            try:
                handler(message.subject, message.data, message.headers or {})
            except Exception:
                log.exception("message handler failed", subject=message.subject)

        return await self._client.subscribe(subject, cb=receive)

    async def hear(self, subject: str, what: str, decode: Callable[[bytes], T], handler: Callable[[T], None]) -> None:
        """Calls `handler` with each message on `subject`, decoded. One that is malformed, or of another version, is
        skipped; `what` names it in the log."""

        def receive(place: str, payload: bytes, headers: dict[str, str]) -> None:
            try:
                message = decode(payload)
            except msgspec.DecodeError as error:
                skipped(what, place, error)
            else:
                handler(message)

        await self.subscribe(subject, receive)

    async def answer(self, subject: str, handler: Callable[[bytes], Coroutine[Any, Any, bytes | None]]) -> Subscription:
        """Answers each question on `subject` with the result of `handler`, one after the other, also after outages.
        None is no answer, because another one may have it. An error of the handler is logged, and is no answer."""

        async def receive(message: Msg) -> None:
            try:
                if (answer := await handler(message.data)) is not None:
                    await message.respond(answer)
            except Exception:
                log.exception("question not answered", subject=message.subject)

        return await self._client.subscribe(subject, cb=receive)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Works also while the server is away."""
        with contextlib.suppress(*NATS_ERRORS):
            await subscription.unsubscribe()

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """The answer to a question. Raises nats_errors.NoRespondersError when nobody listens, and NATS_ERRORS."""
        answer = await self._unless_away(self._client.request(subject, payload, timeout=timeout_s))
        return answer.data

    async def flush(self, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """A round trip to the server: afterwards, what it had sent before is in our queues. Raises NATS_ERRORS."""
        async with asyncio.timeout(timeout_s):
            await self._unless_away(self._client.rtt(timeout=round(timeout_s) + 1))

    async def publish_stored(self, subject: str, payload: bytes, headers: dict[str, str] | None = None) -> None:
        """JetStream: returns when the stream has stored the message. Raises NATS_ERRORS."""
        await self._unless_away(self._jetstream.publish(subject, payload, headers=headers))

    async def publish_pipelined(self, subject: str, payload: bytes) -> "asyncio.Future[PubAck]":
        """JetStream: returns at once; messages are stored in order. The future is the acknowledgement, which never
        comes when the connection is lost. Raises NATS_ERRORS."""
        if not self.connected:
            raise nats_errors.ConnectionReconnectingError
        return await self._jetstream.publish_async(subject, payload)

    async def ensure_stream(self, config: StreamConfig) -> None:
        """Creates the stream, or gives an existing one this configuration, on REPLICAS servers where there are so many.
        A server with little storage gives a smaller stream, of MIN_STREAM_BYTES at least. Raises NATS_ERRORS."""
        config = config.evolve(num_replicas=REPLICAS if self._servers >= REPLICAS else 1)
        while True:
            try:
                return await self._create_or_update(config)
            except js_errors.APIError as error:
                smaller = (config.max_bytes or 0) // 2
                if error.err_code != NO_STORAGE or smaller < MIN_STREAM_BYTES:
                    raise
                config = config.evolve(max_bytes=smaller)

    async def _create_or_update(self, config: StreamConfig) -> None:
        try:
            await self._unless_away(self._jetstream.add_stream(config))
        except js_errors.BadRequestError as error:
            if error.err_code != STREAM_NAME_IN_USE:
                raise
            await self._unless_away(self._jetstream.update_stream(config))

    async def stored_message(self, stream: str, subject: str, from_sequence: int | None = None) -> RawStreamMsg | None:
        """The last stored message of a subject, or with `from_sequence` the first one at or after that number; None
        when there is none. Raises NATS_ERRORS."""
        following = from_sequence is not None
        request = self._jetstream.get_msg(stream, seq=from_sequence, subject=subject, direct=True, next=following)
        try:
            return await self._unless_away(request)
        except js_errors.NotFoundError:
            return None

    async def stored_subjects(self, stream: str, pattern: str) -> list[str]:
        """Subjects whose messages the stream holds; empty without such a stream. Raises NATS_ERRORS."""
        try:
            info = await self._unless_away(self._jetstream.stream_info(stream, subjects_filter=pattern))
        except js_errors.NotFoundError:
            return []
        return list(info.state.subjects or {})

    async def stored_sequences(self, stream: str) -> range:
        """Sequence numbers from the first to the last message that the stream holds. Raises NATS_ERRORS."""
        state = (await self._unless_away(self._jetstream.stream_info(stream))).state
        return range(state.first_seq, state.last_seq + 1)

    async def stored_messages(
        self, stream: str, subject: str, start: int | datetime, limit: int
    ) -> list[StoredMessage]:
        """Up to `limit` stored messages of a subject in order, from a sequence number or a time on. Empty when nothing
        is stored, or without such a stream. Raises NATS_ERRORS."""
        request = direct_get(self._client, stream, subject, start, limit, REQUEST_TIMEOUT_S)
        return await self._unless_away(request)

    async def _unless_away(self, request: Coroutine[Any, Any, T]) -> T:
        """Makes a request fail at once when the connection is lost, not only at its timeout."""
        if not self.connected:
            request.close()
            raise nats_errors.ConnectionReconnectingError
        task = asyncio.ensure_future(request)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)
        try:
            return await task
        except asyncio.CancelledError:
            ourselves = asyncio.current_task()
            if self.connected or (ourselves is not None and ourselves.cancelling()):
                raise
            raise nats_errors.ConnectionReconnectingError from None

    async def close(self) -> None:
        """Idempotent. Does not need the server."""
        self._closing = True
        if not self.connected:
            self._drop_buffered()  # or nats-py writes it to the dead connection, fails and leaves its tasks running
        self._give_up_requests()
        try:
            await asyncio.wait_for(self._client.close(), CLOSE_TIMEOUT_S)
        except OSError as error:  # TimeoutError: as of a frozen server, which does not end its TLS
            log.debug("connection lost while closing", client=self.name, error=str(error))
            writer = getattr(self._client._transport, "_io_writer", None)
            if writer is not None:
                writer.transport.abort()
                await asyncio.sleep(0)  # until the event loop has closed the socket

    async def _connect(self, url: str, login: NatsLogin) -> None:
        self._client.internal = login.tls
        self._servers = len(each_url(url))
        await self._client.connect(
            servers=each_url(url),
            name=self.name,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # annotated int, used as seconds to sleep
            connect_timeout=round(CONNECT_TIMEOUT_S),
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=2,
            error_cb=self._error,
            disconnected_cb=self._disconnected,
            reconnected_cb=self._reconnected,
            **login.options(),
        )
        self._connected.set()

    async def _error(self, error: Exception) -> None:
        # While the server is away, each failed attempt to reconnect calls this.
        self.problem = str(error) or type(error).__name__
        log.debug("nats", client=self.name, error=self.problem)
        if "authorization violation" in str(error).lower():
            # A server that reads its configuration again refuses whoever comes at that moment.
            self._refusals += 1
            if self._refusals > 1:
                self._refused.set()

    async def _disconnected(self) -> None:
        if self._closing or not self.connected:
            return
        self.disconnects += 1
        self._give_up_requests()
        self._drop_buffered()
        log.warning("NATS is away; reconnecting", client=self.name)
        for callback in self._on_disconnect:
            callback()

    def _give_up_requests(self) -> None:
        self._connected.clear()
        for task in list(self._requests):
            task.cancel()

    def _drop_buffered(self) -> None:
        """Drops what nats-py would send after the next connect: it is out of date, or its publisher sends it again."""
        self._client._pending.clear()
        self._client._pending_data_size = 0

    async def _reconnected(self) -> None:
        self._connected.set()
        log.info("NATS is back", client=self.name)
        for callback in self._on_reconnect:
            callback()


async def connect(
    url: str, name: str, namespace: str = "default", timeout_s: float | None = None, login: NatsLogin = NO_LOGIN
) -> NatsClient:
    """Waits for the server, at most `timeout_s` (None: as long as it takes). A login in the URL takes precedence over
    `login`. Raises UnavailableError when the time is up, UnauthorizedError when the server refuses the login
    twice."""
    shown, in_url = split_url(url)
    client = NatsClient(name, namespace)
    connecting = asyncio.ensure_future(client._connect(shown, in_url or login))
    refused = asyncio.create_task(client._refused.wait())
    try:
        quick_s = TELL_AFTER_S if timeout_s is None else min(TELL_AFTER_S, timeout_s)
        first, _ = await asyncio.wait({connecting, refused}, timeout=quick_s, return_when=asyncio.FIRST_COMPLETED)
        rest_s = None if timeout_s is None else timeout_s - quick_s
        if not first and rest_s != 0:
            log.warning("waiting for NATS", url=shown, timeout_s=timeout_s, why=client.problem)
            await asyncio.wait({connecting, refused}, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            await connecting
            return client
        if refused.done():
            raise UnauthorizedError(f"NATS at {shown}", LOGIN_REMEDY)
        hint = "" if shown.startswith(TLS_SCHEME) else f"; a server with TLS is named {TLS_SCHEME}://HOST:PORT"
        raise UnavailableError(f"NATS at {shown} did not answer within {timeout_s:g} s: {client.problem}{hint}")
    except OSError as error:
        raise UnavailableError(f"NATS at {shown} cannot be reached: {error}") from error
    finally:
        refused.cancel()
        if not client.connected:
            await end_tasks(connecting)
            await client.close()
