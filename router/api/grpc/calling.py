"""Calls for text, whichever gRPC service they ask: who calls, how each ends, and how long the server waits for that."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import structlog

from router.api.grpc.errors import Status, spare, status_of
from router.api.wishes.validation import Call, make_request_id, seconds_of, tenant_of
from router.requests.frontend import Models
from runtime.errors import RouterLeavesError
from runtime.security.bearer_keys import BearerKeys
from runtime.security.callers import ANYONE, Caller
from runtime.security.grpc_bearer import HEADER
from runtime.side_lane import TENANT

REQUEST_ID_METADATA = "x-request-id"
TENANT_METADATA = "baton-tenant"
FIRST_TOKEN_METADATA = "baton-deadline-ms"  # of the first token: a request that would miss it is refused
EARLIER_S = (0.05, 0.25)  # at least and at most
EARLIER_SHARE = 0.05
STALL_GRACE_S = 5.0  # beyond the deadline, for a client to take what is left

log = structlog.get_logger()


@dataclass(slots=True)
class Outcome:
    shown_id: str  # see make_request_id, as for the next one
    work_id: str
    status: Status | None = None  # why the request has failed

    def name(self, wanted: str | None, context: Any, field: str = "request_id") -> None:
        """`field`: the caller's name of the id. Raises InvalidRequestError."""
        wanted = wanted or metadata(context, REQUEST_ID_METADATA)
        self.shown_id, self.work_id = make_request_id(wanted, field)


def left_s(context: Any) -> float | None:
    """Seconds in which a call is to end here; None: its caller has no deadline. It is a little less than the caller
    waits: gRPC would end the call itself then, and on a connection that has its age it reads as UNAVAILABLE."""
    remaining_s: float | None = context.time_remaining()
    if remaining_s is None:
        return None
    least_s, most_s = EARLIER_S
    return remaining_s - min(max(EARLIER_SHARE * remaining_s, least_s), most_s, remaining_s / 2)


def deadline_s(context: Any) -> float | None:
    """The same on the monotonic clock."""
    timeout_s = left_s(context)
    return None if timeout_s is None else time.monotonic() + timeout_s


class Calls:
    def __init__(self, models: Models, keys: BearerKeys | None) -> None:
        self._models = models
        self._keys = keys
        self._running: set[asyncio.Task[Any]] = set()

    async def until_idle(self, timeout_s: float) -> None:
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The current task serves a call."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    @contextmanager
    def outcome(self) -> Iterator[Outcome]:
        """Wraps the work of a request: the outcome gets the status of what the work raises, and is counted."""
        outcome = Outcome(*make_request_id(None))
        try:
            yield outcome
        except grpc.aio.InternalError:  # the caller left while we wrote
            return
        except Exception as error:
            if isinstance(error, TimeoutError):
                spare(log.warning, "client does not read its answer", request_id=outcome.work_id)
                status = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the answer was not read in time")
            else:
                status = status_of(error, outcome.shown_id)
            if not isinstance(error, RouterLeavesError):
                told = (*status.trailing_metadata, (REQUEST_ID_METADATA, outcome.shown_id))
                status = replace(status, trailing_metadata=told)
            outcome.status = status
            self._models.answered("grpc", outcome.status.code.name, error)
        else:
            self._models.answered("grpc", grpc.StatusCode.OK.name, None)

    def admit(self, context: Any, work_id: str, **fields: Any) -> Call:
        """`fields`: of Call. Raises InvalidRequestError, and OverloadedError when the caller's rate limit is
        reached."""
        caller = self._caller(context)
        self._models.rate_limits.account(caller).admit()
        tenant = self.enter_tenant(context)
        first_token_s = seconds_of(FIRST_TOKEN_METADATA, metadata(context, FIRST_TOKEN_METADATA), per_s=1000)
        return Call(request_id=work_id, caller=caller, tenant=tenant, first_token_s=first_token_s, **fields)

    def enter_tenant(self, context: Any) -> str:
        """The tenant of a call, which the current task serves from now on. Raises InvalidRequestError."""
        tenant = tenant_of(self._caller(context), TENANT_METADATA, metadata(context, TENANT_METADATA))
        TENANT.set(tenant)
        return tenant

    def _caller(self, context: Any) -> Caller:
        shown = metadata(context, HEADER) or ""
        return ANYONE if self._keys is None else self._keys.caller(shown.encode()) or ANYONE


def metadata(context: Any, name: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None
