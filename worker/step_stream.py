"""The `steps` streams: commands of one router come in, one message per engine step goes out.

Owns the open streams. What is to be sent is collected per router; when a router reads slowly, or steps are quicker than
`workers.gather_ms`, the news of several steps leave in one message, with one delta per request.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from baton_proto.discovery import WorkerLoad
from baton_proto.worker import Cancel, Delta, StepMessage, Submit, WorkerCommand, decoder
from runtime.streams.message_stream import MessageStream

decode_command = decoder(WorkerCommand)

log = structlog.get_logger()


class RouterStream:
    """One router's open stream. Event loop only.

    News that somebody waits for, the first and the last of a request, leave when the event loop comes around. The rest
    leaves at most every `gather_s`, for what a message costs the router hardly depends on how many tokens are in it.
    """

    def __init__(
        self, router_id: str, stream: MessageStream, gather_s: float, current_load: Callable[[], WorkerLoad]
    ) -> None:
        self.router_id = router_id
        self._stream = stream
        self._gather_s = gather_s
        self._current_load = current_load
        self._loop = asyncio.get_running_loop()
        self._deltas: dict[str, list[Delta]] = {}  # by request
        self._soon: asyncio.Handle | None = None  # leaves on the next turn of the event loop
        self._timer: asyncio.TimerHandle | None = None  # or then
        self._blocked = False  # or when the router has read what it got
        self._not_before_s = 0.0

    def send(self, delta: Delta) -> None:
        """Leaves with everything else that is sent before the step is over or the event loop comes around."""
        self._deltas.setdefault(delta.request_id, []).append(delta)
        if delta.cached_tokens is not None or delta.finish is not None or delta.failure is not None:
            self._leave_soon()
        else:
            self._leave_in_time()

    def step_is_over(self) -> None:
        """All of its news were sent, and there is a new load to report, if nothing else: what is due leaves now."""
        self._leave_in_time()
        if self._soon is not None:
            self.leave()

    @property
    def writable(self) -> bool:
        """The router keeps up with what it is sent."""
        return self._stream.writable

    def close(self) -> None:
        """Ends the stream after what is pending was written."""
        if self._deltas:
            self._write()
        self._stream.close()

    def _leave_soon(self) -> None:
        if self._soon is None and not self._blocked:
            self._soon = self._loop.call_soon(self.leave)

    def _leave_in_time(self) -> None:
        if self._soon is None and self._timer is None:
            if self._loop.time() >= self._not_before_s:
                self._leave_soon()
            else:
                self._timer = self._loop.call_at(self._not_before_s, self.leave)

    def leave(self) -> None:
        """Writes what waits, if the router reads."""
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        self._soon = self._timer = None
        self._blocked = not self._stream.writable
        if not self._blocked:
            self._write()

    def _write(self) -> None:
        deltas = list(map(_joined, self._deltas.values()))
        self._deltas.clear()
        self._stream.send(StepMessage(deltas, self._current_load()))
        self._not_before_s = self._loop.time() + self._gather_s


class StepHandler(Protocol):
    """What a worker does with a router's commands."""

    def submit(self, router: RouterStream, request: Submit) -> None: ...

    def cancel(self, router: RouterStream, request_id: str) -> None: ...

    def router_gone(self, router: RouterStream) -> None:
        """Nobody listens any more: end the router's requests."""
        ...


class StepStreams:
    def __init__(self, handler: StepHandler, gather_s: float, current_load: Callable[[], WorkerLoad]) -> None:
        """`current_load` goes along with every message."""
        self._current_load = current_load
        self._gather_s = gather_s
        self._handler = handler
        self._open: set[RouterStream] = set()

    async def serve(self, stream: MessageStream, router_id: str) -> None:
        """From the hellos to the end."""
        router = RouterStream(router_id, stream, self._gather_s, self._current_load)
        self._open.add(router)
        log.info("router connected", router=router_id)
        try:
            stream.listen(decode_command, lambda command: self._obey(router, command), router.leave)
            reason = await stream.ended()
        finally:
            self._open.discard(router)
            self._handler.router_gone(router)
        log.info("router disconnected", router=router_id, reason=reason)

    def step_is_over(self) -> None:
        """Once per engine step, after the step's deltas were sent."""
        for router in self._open:
            router.step_is_over()

    def close(self) -> None:
        for router in self._open:
            router.close()

    def _obey(self, router: RouterStream, command: Submit | Cancel) -> None:
        if isinstance(command, Submit):
            self._handler.submit(router, command)
        else:
            self._handler.cancel(router, command.request_id)


def _joined(deltas: list[Delta]) -> Delta:
    """The news of one request, in order, as one delta."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    return Delta(
        first.request_id,
        [token_id for delta in deltas for token_id in delta.token_ids],
        [logprobs for delta in deltas for logprobs in delta.logprobs],
        first.cached_tokens,
        first.handoff,
        last.finish,
        last.stop_token,
        last.failure,
    )
