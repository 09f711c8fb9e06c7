"""The `steps` streams: commands of one router come in, a message goes out when an engine step is over, or several are.

News are collected per router. When a router reads slowly, or steps are quicker than GATHER_S, the news of
several steps leave in one message, with one delta per request.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog
from msgspec.structs import replace

from baton_proto.decoding import decoder
from baton_proto.discovery import WorkerLoad
from baton_proto.worker import Cancel, Delta, StepMessage, Submit, WorkerCommand
from runtime.streams.message_stream import MessageStream
from worker.gathered_steps import gather_s

decode_command = decoder(WorkerCommand)

log = structlog.get_logger()


class RouterStream:
    """One router's open stream. Event loop only.

    The first and the last news of a request leave on the next turn of the event loop, because a client waits for them.
    Other news leave at most every `gather_s`, see worker/gathered_steps.py.
    """

    def __init__(
        self, router_id: str, stream: MessageStream, configured_s: float, current_load: Callable[[], WorkerLoad]
    ) -> None:
        """`configured_s`: for `gather_s`."""
        self.router_id = router_id
        self._stream = stream
        self._configured_s = configured_s
        self._current_load = current_load
        self._loop = asyncio.get_running_loop()
        self._deltas: dict[str, list[Delta]] = {}  # by request
        self._hurried: dict[str, None] = {}  # of them, those that do not wait for others
        self._soon: asyncio.Handle | None = None  # what is hurried or due leaves on the next turn of the event loop
        self._timer: asyncio.TimerHandle | None = None  # the others then
        self._blocked = False  # or when the router has read what it got
        self._not_before_s = 0.0

    def send(self, delta: Delta) -> None:
        """The delta leaves with others that are sent before the step is over or the event loop turns."""
        self._deltas.setdefault(delta.request_id, []).append(delta)
        if delta.hurries:
            self._hurried[delta.request_id] = None
            self._leave_soon()
        else:
            self._leave_in_time()

    def send_tokens(self, request_id: str, token_ids: list[int]) -> None:
        """Sends a delta with nothing but tokens. The list is the stream's from now on."""
        waiting = self._deltas.get(request_id)
        if waiting is None:
            self._deltas[request_id] = [Delta(request_id, token_ids)]
        elif waiting[-1].logprobs:
            waiting.append(Delta(request_id, token_ids))
        else:
            waiting[-1].token_ids.extend(token_ids)
        if self._timer is None:
            self._leave_in_time()

    def step_is_over(self) -> None:
        """All news of the step were sent: what is due leaves now, at least the new load."""
        self._leave_in_time()
        if self._soon is not None:
            self.leave()

    @property
    def writable(self) -> bool:
        """Whether the router keeps up with what it is sent."""
        return self._stream.writable

    def close(self) -> None:
        """Writes what is pending, then ends the stream."""
        if self._deltas:
            self._write_all()
        self._stream.close()

    def _leave_soon(self) -> None:
        if self._soon is None and not self._blocked:
            self._soon = self._loop.call_soon(self.leave)

    def _leave_in_time(self) -> None:
        if self._soon is None and self._timer is None:
            if self._loop.time() >= self._not_before_s:
                self._leave_soon()
            else:
                self._timer = self._loop.call_at(self._not_before_s, self._leave, True)

    def leave(self) -> None:
        """Writes what is hurried and, in time, what else waits, if the router reads."""
        self._leave(self._loop.time() >= self._not_before_s)

    def _leave(self, everything: bool) -> None:
        """Because uvloop's timers may ring half a millisecond early, the timer does not ask for the time again."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        if everything and self._timer is not None:  # else it stays, for the load
            self._timer.cancel()
            self._timer = None
        self._blocked = not self._stream.writable
        if self._blocked:
            return
        if everything:
            self._write_all()
        elif self._hurried:
            self._write([self._deltas.pop(request_id) for request_id in self._hurried])
        if self._deltas:
            self._leave_in_time()

    def _write_all(self) -> None:
        news = list(self._deltas.values())
        self._deltas.clear()
        self._not_before_s = self._loop.time() + gather_s(self._configured_s, len(news))
        self._write(news)

    def _write(self, news: list[list[Delta]]) -> None:
        deltas = list(map(_joined, news))
        self._hurried.clear()
        load = self._current_load()
        # Those with log-probabilities of prompts leave one by one: together they may be too long for a message.
        long = [delta for delta in deltas if delta.prompt_logprobs is not None]
        for delta in long:
            self._stream.send(StepMessage([delta], load))
        if long:
            deltas = [delta for delta in deltas if delta.prompt_logprobs is None]
        self._stream.send(StepMessage(deltas, load))


class StepHandler(Protocol):
    """What a worker does with a router's commands."""

    def submit(self, router: RouterStream, request: Submit) -> None: ...

    def cancel(self, router: RouterStream, request_id: str) -> None: ...

    def router_gone(self, router: RouterStream) -> None:
        """The stream has ended: end the router's requests."""


class StepStreams:
    def __init__(self, handler: StepHandler, configured_s: float, current_load: Callable[[], WorkerLoad]) -> None:
        """Every message carries `current_load()`. `configured_s`: for `gather_s`."""
        self._current_load = current_load
        self._configured_s = configured_s
        self._handler = handler
        self._open: set[RouterStream] = set()

    async def serve(self, stream: MessageStream, router_id: str) -> None:
        """Serves the stream from the hellos to its end."""
        router = RouterStream(router_id, stream, self._configured_s, self._current_load)
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
        """After the deltas of a step were sent, or of several quick ones."""
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
    """Joins the news of one request, in order, to one delta."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    return replace(
        first,
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[logprobs for delta in deltas for logprobs in delta.logprobs],
        finish=last.finish,
        stop_token=last.stop_token,
        failure=last.failure,
        accepted_tokens=last.accepted_tokens,
    )
