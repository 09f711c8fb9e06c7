"""The router's link to one incarnation of one worker: the step stream, which all requests share, and a client for
everything else that a worker can be asked.

When the stream breaks, every request on it fails at once, and the link dials again until it is closed. Event loop only.
"""

import asyncio
import random
from collections.abc import Callable

import structlog

from baton_proto.decoding import decoder
from baton_proto.discovery import WorkerLoad, WorkerRecord
from baton_proto.worker import MAJOR, STEPS, Cancel, Delta, Hello, StepMessage, Submit, WorkerReport
from router.workers.inbox import Inbox
from router.workers.pace import Pace
from runtime.calls.worker import WorkerClient
from runtime.discovery.worker_key import WorkerKey
from runtime.end_task import end_tasks
from runtime.errors import ProtocolError, UnauthorizedError, WorkerLostError
from runtime.host import process_name
from runtime.security.cluster_key import ClusterKey
from runtime.streams.message_stream import ENDED, MessageStream, open_stream

HELLO_TIMEOUT_S = 5.0
MIN_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0

decode_report = decoder(WorkerReport)

log = structlog.get_logger()


class WorkerLink:
    """Calls `on_load` with the load of every step message, and `on_change` when `connected` or `failed` changes."""

    def __init__(
        self,
        record: WorkerRecord,
        router_id: str,
        on_load: Callable[[WorkerLoad], None],
        on_change: Callable[[], None],
        key: ClusterKey | None = None,
        pace: Pace | None = None,
    ) -> None:
        """`pace`: of all links of the router."""
        self._pace = pace or Pace()
        self.worker: WorkerKey = (record.worker_id, record.incarnation)
        self.failed = False  # the last stream broke or could not be opened
        self.refusal = ""  # why the worker took no stream, the last time
        self._closing = False
        self._router_id = router_id
        self._key = key
        self._on_load = on_load
        self._on_change = on_change
        self._inboxes: dict[str, Inbox] = {}
        self._address = record.stream_address
        self._stream: MessageStream | None = None  # None until both hellos were exchanged
        self.client = WorkerClient(record.worker_id, record.rpc_address, key, record.incarnation)
        self._task = asyncio.create_task(self._keep_connected())

    # --- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Submit) -> Inbox:
        """Sends the request. The inbox receives its deltas, or WorkerLostError when the stream breaks before the last
        one. Raises WorkerLostError when there is no stream. Invariant: a request id is used once on a link."""
        if self._stream is None:
            raise WorkerLostError(self.worker[0], "not connected")
        assert request.request_id not in self._inboxes
        inbox = self._inboxes[request.request_id] = Inbox(self._pace)
        self._stream.send(request)
        return inbox

    def cancel(self, request_id: str) -> None:
        """Tells the worker to stop; no more deltas of the request are delivered. No effect on an ended request."""
        if (inbox := self._inboxes.pop(request_id, None)) is None:
            return
        self._pace.num_requests -= inbox.has_begun
        if self._stream is not None:
            self._stream.send(Cancel(request_id))

    def give_up(self, error: Exception) -> None:
        for inbox in self._inboxes.values():
            inbox.fail(error)

    @property
    def connected(self) -> bool:
        return self._stream is not None

    @property
    def in_flight(self) -> int:
        return len(self._inboxes)

    # --- the stream ---------------------------------------------------------------------------------------------------

    async def close(self, reason: str) -> None:
        """Ends the link; requests on it fail with `reason`."""
        self._closing = True
        await end_tasks(self._task)
        self._disconnected(reason)
        await self.client.close()

    async def _keep_connected(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            reason = await self._session()
            if self.connected:
                backoff_s = MIN_BACKOFF_S
            self._disconnected(reason)
            log.debug("no stream to the worker", worker=self.worker[0], reason=reason, retry_s=backoff_s)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _session(self) -> str:
        """Opens a stream and reads it to its end. Returns why it ended."""
        stream = None
        ours = Hello(MAJOR, self._router_id, self.worker[1], STEPS, process_name())
        try:
            stream, theirs = await open_stream(self._address, self.worker[0], ours, HELLO_TIMEOUT_S, self._key)
            self._check_hello(theirs)
            self._stream, self.failed, self.refusal = stream, False, ""
            log.info("worker connected", worker=self.worker[0], incarnation=self.worker[1])
            self._on_change()
            stream.listen(decode_report, self._dispatch)
            return await stream.ended()
        except TimeoutError:
            return f"no hello within {HELLO_TIMEOUT_S:.1f} s"
        except (UnauthorizedError, ProtocolError) as error:
            report = log.debug if self.refusal else log.warning  # one warning until the next success
            self.refusal = str(error)
            report("worker not used", worker=self.worker[0], reason=self.refusal)
            return self.refusal
        except OSError as error:
            return str(error)
        finally:
            if stream is not None:
                stream.abort("the link is closed")

    def _check_hello(self, hello: Hello) -> None:
        if (hello.sender, hello.incarnation) != self.worker:
            other = f"{hello.sender}, incarnation {hello.incarnation}"
            raise ProtocolError(self.worker[0], f"another worker answers: {other}")

    def _dispatch(self, message: StepMessage) -> None:
        self._on_load(message.load)
        is_turn: bool | None = None  # of the tokens that do not hurry, if there are any
        for delta in message.deltas:
            if delta.hurries:
                self._deliver(delta, at_once=True)
            else:
                is_turn = self._pace.takes() if is_turn is None else is_turn
                self._deliver(delta, at_once=is_turn)

    def _deliver(self, delta: Delta, *, at_once: bool) -> None:
        inbox = self._inboxes.get(delta.request_id)
        if inbox is None:
            return  # the router cancelled the request while the delta was on its way
        if not inbox.has_begun:
            inbox.has_begun = True
            self._pace.num_requests += 1
        if delta.finish is not None or delta.failure is not None:
            del self._inboxes[delta.request_id]
            self._pace.num_requests -= 1
        inbox.put(delta, at_once=at_once)

    def _disconnected(self, reason: str) -> None:
        """Fails all requests, because the next stream knows none of them."""
        inboxes, self._inboxes = list(self._inboxes.values()), {}
        self._pace.num_requests -= sum(inbox.has_begun for inbox in inboxes)
        was_connected = self.connected
        self._stream, self.failed = None, True
        if was_connected:
            in_order = not inboxes and (self._closing or reason == ENDED)
            report = log.info if in_order else log.warning
            report("worker disconnected", worker=self.worker[0], reason=reason, requests=len(inboxes))
            self._on_change()
        for inbox in inboxes:
            inbox.fail(WorkerLostError(self.worker[0], reason, None if self._closing else self.worker))
