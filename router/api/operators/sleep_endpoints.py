"""`POST /sleep`, `POST /wake_up` and `GET /is_sleeping`, as vLLM names them: of one worker, or of all at once.

Answers are `{"workers": [...]}`, one row per worker; with status 503 when a row has a `problem`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton_proto.generated import inference_pb2 as pb
from router.api.http.json_response import json_response
from router.api.operators.guard import OperatorsGuard
from router.views.sleep_control import SleepControl
from runtime.calls.answer import message_fields
from runtime.errors import BatonError, InvalidRequestError

Row = dict[str, Any]
LEVELS = ("1", "2")


class SleepEndpoints:
    def __init__(self, control: SleepControl, guard: OperatorsGuard) -> None:
        self._control = control
        self._guarded = guard.guarded

    def routes(self) -> list[Route]:
        return [
            Route("/sleep", self._guarded(self._sleep), methods=["POST"]),
            Route("/wake_up", self._guarded(self._wake), methods=["POST"]),
            Route("/is_sleeping", self._guarded(self._is_sleeping)),
        ]

    async def _sleep(self, http: Request) -> Response:
        level = http.query_params.get("level", "1")
        if level not in LEVELS:
            raise InvalidRequestError("level", f"{level[:20]!r} is none of {', '.join(LEVELS)}")

        async def sleep(worker: str) -> Row:
            return message_fields(await self._control.sleep(pb.SleepRequest(worker_id=worker, level=int(level))))

        return _answer(await self._each(http, sleep))

    async def _wake(self, http: Request) -> Response:
        tags = [tag for given in http.query_params.getlist("tags") for tag in given.split(",") if tag]

        async def wake(worker: str) -> Row:
            return message_fields(await self._control.wake(pb.WakeRequest(worker_id=worker, tags=tags)))

        return _answer(await self._each(http, wake))

    async def _is_sleeping(self, http: Request) -> Response:
        """Answers `is_sleeping: true` while any worker that answers sleeps, even in part."""

        async def state(worker: str) -> Row:
            return {"worker_id": worker, "state": await self._control.state(worker)}

        rows = await self._each(http, state)
        return _answer(rows, is_sleeping=any(row.get("state") == "sleeping" for row in rows))

    async def _each(self, http: Request, ask: Callable[[str], Awaitable[Row]]) -> Sequence[Row]:
        """Raises InvalidRequestError when the one worker that is named is not known."""

        async def row(worker: str) -> Row:
            try:
                return await ask(worker)
            except InvalidRequestError:
                raise
            except BatonError as error:
                return {"worker_id": worker, "problem": str(error)}

        worker = http.query_params.get("worker")
        return await asyncio.gather(*map(row, self._control.known() if worker is None else [worker]))


def _answer(rows: Sequence[Row], **more: Any) -> Response:
    return json_response({**more, "workers": rows}, 503 if any("problem" in row for row in rows) else 200)
