"""Asks the supervisor to wake the workers of a model, once for all requests that find them asleep."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from baton_proto.waking import MAJOR, Outcome, Question, decode_answer, encode
from runtime.calls.over_nats import answer_of
from runtime.end_task import end_tasks
from runtime.errors import AsleepError, BatonError, DeadlineError, UnavailableError
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.subjects import wake_subject

AGAIN_S: Final = 1.0  # an answer holds for so long
LEAST_RETRY_S: Final = 1.0
ASK_SHARE: Final = 0.8  # of that time is the supervisor's: so the reason of its refusal is there in time
GRACE_S: Final = 5.0  # of the answer behind the time that the supervisor keeps itself

Ask = Callable[[float], Awaitable[Outcome]]
"""Timeout in seconds -> what came of it. Raises UnavailableError and NATS_ERRORS when nobody answers, DeadlineError."""

log = structlog.get_logger()


class Waking:
    """Event loop only. `timeout_s`: for which a request waits. `until_asked`: the model sleeps between requests, so a
    sleeping one counts as ready."""

    def __init__(self, ask: Ask, timeout_s: float, *, until_asked: bool = False) -> None:
        self.ask = ask
        self.timeout_s = timeout_s
        self.until_asked = until_asked
        self._task: asyncio.Task[None] | None = None
        self._answered_s = -AGAIN_S
        self._outcome = Outcome("none")
        self._took_s: float | None = None  # from the question to the first worker that was awake, the last time

    def question(self) -> "asyncio.Task[None] | None":
        """The question under way, which begins here unless one was answered just now. Raises AsleepError when the
        workers could not be woken."""
        if self.is_under_way:
            return self._task
        if time.monotonic() - self._answered_s < AGAIN_S:
            if self._outcome.state == "failed":
                raise AsleepError(f"the model sleeps on: {self._outcome.problem}", self.retry_after_s)
            return None
        self._task = asyncio.create_task(self._wake(), name="waking a model")
        return self._task

    @property
    def is_heard(self) -> bool:
        """Whether somebody wakes workers here; False too when none of them sleeps."""
        return self._outcome.state != "none" or self.is_under_way

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def retry_after_s(self) -> float:
        return max(LEAST_RETRY_S, self.timeout_s if self._took_s is None else self._took_s)

    def left_s(self, since_s: float) -> float:
        """Until a request that waits since then asks again at the latest. Raises AsleepError."""
        if (left_s := since_s + self.timeout_s - time.monotonic()) <= 0:
            raise self._late()
        return min(left_s, self.timeout_s if self.is_under_way else AGAIN_S)

    def _late(self) -> AsleepError:
        why = f" ({self._outcome.problem})" if self._outcome.state == "busy" else ""
        took = "" if self._took_s is None else f"; the last time that took {self._took_s:.1f} s"
        problem = f"the model sleeps, and did not wake within {self.timeout_s:g} s{why}{took}"
        return AsleepError(problem, self.retry_after_s)

    async def close(self) -> None:
        await end_tasks(self._task)

    async def _wake(self) -> None:
        began_s = time.monotonic()
        try:
            outcome = await self.ask(ASK_SHARE * self.timeout_s)
        except DeadlineError as error:
            outcome = Outcome("busy", str(error))
        except (UnavailableError, *NATS_ERRORS) as error:
            log.info("nobody wakes the workers", reason=str(error))
            outcome = Outcome("none")
        except BatonError as error:
            outcome = Outcome("failed", str(error))
        self._outcome, self._answered_s = outcome, time.monotonic()
        if outcome.state == "awake":
            self._took_s = self._answered_s - began_s


def ask_supervisor(nats: NatsClient) -> Ask:
    """`nats`: for the namespace of the model."""

    async def ask(timeout_s: float) -> Outcome:
        question, absent = encode(Question(MAJOR, timeout_s)), "no supervisor is there that wakes workers"
        limit_s = timeout_s + GRACE_S
        subject = wake_subject(nats.namespace)
        return await answer_of("supervisor", nats, subject, question, decode_answer, limit_s, absent)

    return ask
