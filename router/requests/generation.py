"""Runs a request to its end: its choices beside each other, each replayed elsewhere when a worker is lost.

Invariant: all that a request holds (its place in the queue, charges, its sequences on the workers) is released by
leaving the `with` blocks of `generate` and Choice.stream, on every path: finished, failed, out of time, or the caller
closing the iterator.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from msgspec.structs import replace

from router.counters.tally import RequestTally
from router.counters.usage import Payer
from router.requests.choice import Choice, Parts
from router.requests.frontend import Limits, ModelState
from router.requests.merge import merge
from router.requests.rate_limits import Account
from router.requests.request import Finished, GenerateRequest, Piece
from router.requests.shared_prompt import SharedPrompt
from router.requests.spread import Spread
from router.text.tokenizer import Tokenizer
from router.workers.pool import largest
from runtime.errors import RouterLeavesError, UnavailableError

CUT_OFF = "the router ends: the next one goes on with the answer, behind the last event that came"


@contextmanager
def _charged(account: Account | None, tally: RequestTally) -> Iterator[None]:
    """Charges the prompt now and at the end what was generated, however the request ends."""
    if account is None:
        yield
        return
    account.spend(tally.prompt_tokens)
    try:
        yield
    finally:
        account.spend(tally.tokens.output_tokens)


class Generator:
    def __init__(self, parts: Parts, max_model_len: int) -> None:
        """`max_model_len`: tokens of prompt and output that the model takes, wherever it runs."""
        self._parts = parts
        self._max_model_len = max_model_len
        self._leaving = self._draining = False
        self._spread = Spread()  # of the choices of all requests

    @property
    def tokenizer(self) -> Tokenizer:
        return self._parts.tokenizer

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Piece | Finished, None]:
        """Pieces, in order per choice, then one Finished. Closing the iterator cancels the request everywhere.

        Raises OverloadedError, UnavailableError, DeadlineError, InvalidRequestError (no worker is large enough).
        """
        key = "" if request.account is None else request.account.key
        payer = Payer(key, request.tenant, request.adapter or self._parts.pool.model)
        with RequestTally(self._parts.metrics, request.request_id, len(request.prompt), payer) as tally:
            if self._draining:
                kind = RouterLeavesError if request.cuts else UnavailableError  # an answer goes on at the next router
                raise kind("the router is draining and takes no new requests")
            admitted = self._parts.queue.admit(request.priority, request.tenant, request.deadline_s)
            with admitted as ticket, _charged(request.account, tally):
                prompt, parts = SharedPrompt(request, self._spread), self._parts
                choices = [
                    Choice(parts, request, tally.choice(i), ticket, prompt) for i in range(len(request.sampling))
                ]
                if len(choices) == 1:
                    async with aclosing(choices[0].stream()) as pieces:
                        async for piece in pieces:
                            yield piece
                else:
                    async with aclosing(merge([choice.stream() for choice in choices])) as merged:
                        async for _, piece in merged:
                            yield piece
        num_output_tokens = sum(len(choice.output) for choice in choices)
        told = replace(tally.tokens, prompt_tokens=prompt.num_tokens, output_tokens=num_output_tokens)
        yield Finished(told, tally.choices)

    def limits(self) -> Limits:
        """Limits that validation needs before a request is made."""
        pool = self._parts.pool
        tasks, dimension = pool.tasks()
        return Limits(self._max_model_len, largest(pool.ready_decode()), pool.longest_away(), tasks, dimension)

    def adapters(self) -> frozenset[str]:
        return self._parts.pool.adapters()

    def not_ready(self) -> str | None:
        """Why no request can be served now; None: ready."""
        if self._leaving:
            return "the router is draining"
        pool = self._parts.pool
        if pool.ready_decode() or (pool.rests() and self._parts.waking.until_asked):
            return None
        return f"no decode worker is ready{pool.absent()}"

    def state(self) -> ModelState:
        if self._parts.pool.rests():
            return "waking" if self._parts.waking.is_under_way else "asleep"
        return "ready" if self._parts.pool.ready_decode() else "not ready"

    def leave(self) -> None:
        """Says from now on that it is not ready, and serves on."""
        self._leaving = True

    @property
    def is_idle(self) -> bool:
        return self._parts.queue.is_empty

    async def drain(self, timeout_s: float) -> int:
        """Refuses new requests from now on; returns how many are still in flight when the time is up."""
        self._leaving = self._draining = True
        return await self._parts.queue.wait_empty(timeout_s)

    def cut_off(self) -> None:
        """Ends the answers that are being written, with an error that says so."""
        self._parts.pool.give_up(RouterLeavesError(CUT_OFF))
