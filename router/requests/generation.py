"""Runs a request to its end: its choices beside each other, each replayed elsewhere when a worker is lost.

Called by the gRPC and the HTTP API. All that a request holds (its place in the queue, charges, its sequences on the
workers) is released by leaving the blocks below, on every path: finished, failed, out of time, or the caller closing
the iterator.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import structlog

from router.requests.choice import Choice, Parts
from router.requests.frontend import Limits
from router.requests.request import Finished, GenerateRequest, Piece
from router.text.tokenizer import Tokenizer
from router.workers.pool import largest
from runtime.errors import BatonError, DeadlineError, InvalidRequestError, OverloadedError, UnavailableError

log = structlog.get_logger()


class Generator:
    def __init__(self, parts: Parts, max_model_len: int) -> None:
        """`max_model_len`: tokens of prompt and output that the model takes, wherever it runs."""
        self._parts = parts
        self._max_model_len = max_model_len
        self._draining = False

    @property
    def tokenizer(self) -> Tokenizer:
        return self._parts.tokenizer

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Piece | Finished]:
        """Pieces, in order per choice, then one Finished. Closing the iterator cancels the request everywhere.

        Raises OverloadedError, UnavailableError, DeadlineError, InvalidRequestError (no worker is large enough).
        """
        started_s = time.monotonic()
        outcome = "cancelled"
        choices: list[Choice] = []
        try:
            if self._draining:
                raise UnavailableError("the router is draining and takes no new requests")
            with self._parts.queue.admit(request.priority, request.tenant, request.deadline_s) as ticket:
                choices = [Choice(self._parts, request, index, ticket) for index in range(len(request.sampling))]
                streams = [choice.stream() for choice in choices]
                async with aclosing(streams[0] if len(streams) == 1 else _merge(streams)) as pieces:
                    async for piece in pieces:
                        yield piece
            outcome = "completed"
        except BatonError as error:
            outcome = _outcome(error)
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._account(request, choices, outcome, time.monotonic() - started_s)
        yield _finished(request, choices)

    def limits(self) -> Limits:
        """For validation, before a request is made."""
        return Limits(self._max_model_len, largest(self._parts.pool.ready_decode()))

    def not_ready(self) -> str | None:
        """Why no request can be served now; None: ready."""
        if self._draining:
            return "the router is draining"
        return None if self._parts.pool.ready_decode() else "no decode worker is ready"

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests from now on; returns how many are still in flight when the time is up."""
        self._draining = True
        return await self._parts.queue.wait_empty(timeout_s)

    def _account(self, request: GenerateRequest, choices: list[Choice], outcome: str, duration_s: float) -> None:
        prompt_tokens, output_tokens = len(request.prompt), sum(len(choice.output) for choice in choices)
        cached_tokens = _cached_tokens(choices)
        self._parts.metrics.request_ended(outcome, prompt_tokens, output_tokens, cached_tokens, duration_s)
        log.info(
            "request ended",
            request_id=request.request_id,
            outcome=outcome,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            duration_ms=round(duration_s * 1000, 1),
            decode=[choice.service.decode_worker for choice in choices],
            prefill=[choice.service.prefill_worker for choice in choices],
        )


def _finished(request: GenerateRequest, choices: list[Choice]) -> Finished:
    return Finished(
        prompt_tokens=len(request.prompt),
        completion_tokens=sum(len(choice.output) for choice in choices),
        cached_tokens=_cached_tokens(choices),
        served_by=[choice.service for choice in choices],
    )


def _cached_tokens(choices: list[Choice]) -> int:
    """Prompt tokens that no choice had to compute: usage counts the prompt once, whatever the number of choices."""
    return min((choice.service.cached_tokens for choice in choices), default=0)


def _outcome(error: BatonError) -> str:
    match error:
        case InvalidRequestError():
            return "invalid"
        case OverloadedError():
            return "overloaded"
        case UnavailableError():
            return "unavailable"
        case DeadlineError():
            return "deadline"
    return "failed"


async def _merge(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of all streams as they come. The first failure ends the others."""
    arrived: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(stream) as pieces:
                async for piece in pieces:
                    arrived.put_nowait(piece)
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
