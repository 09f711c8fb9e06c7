"""One HTTP request for text, from its body to its last event, in whatever dialect."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final
from zlib import crc32

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from router.api.dialects.dialect import Answer, Asked, Dialect
from router.api.dialects.far_images import fetch_images
from router.api.dialects.json_body import read_soon
from router.api.dialects.plain_request import admit, enter_tenant
from router.api.http.body import received_body
from router.api.http.disconnect import until_disconnect
from router.api.http.errors import describe, error_response
from router.api.http.json_response import json_response
from router.api.http.key_guard import CALLER
from router.api.http.server_sent_events import EventStream
from router.api.resuming.bookmark import Bookmark, Origin
from router.api.resuming.progress import Progress
from router.api.wishes.held_bytes import prompt_bytes
from router.api.wishes.prompt_logprobs import check_call
from router.api.wishes.sampling_options import Options
from router.api.wishes.validation import Call, Prompt, make_request_id, seconds_of, validate
from router.requests.body_budget import FREE_BYTES, Hold
from router.requests.fan_out import generate_all
from router.requests.frontend import Frontend, Models
from router.requests.request import Finished, GenerateRequest, Piece
from runtime.end_task import end_tasks
from runtime.errors import InvalidRequestError
from runtime.security.callers import ANYONE

REQUEST_ID_HEADER = "x-request-id"
TIMEOUT_HEADER = "x-request-timeout-s"  # of the whole answer
FIRST_TOKEN_HEADER = "x-baton-deadline-ms"  # of the first token: a request that would miss it is refused
LAST_EVENT_HEADER = "Last-Event-ID"  # of the last event that the client has: the answer goes on behind it
COMMENT_S: Final = 1.0  # a wake that takes less gets none, and one that fails in less an HTTP status
PRIORITY: Final = "baton.priority"  # in the scope of a request of the router to itself: it goes before the body's
EVENT_STREAM = "text/event-stream"  # asked for by clients that read server-sent events by their standard

Items = AsyncGenerator[Piece | Finished, None]

_Read = tuple[Asked, Options, Sequence[Prompt], int, int]
"""(what is asked, options, prompts, bytes of memory that the prompts of a long body take, checksum of the body of a
stream)"""

log = structlog.get_logger()


class GenerationEndpoint:
    """An ASGI application, because it watches the connection while it generates."""

    def __init__(self, models: Models, dialect: Dialect) -> None:
        self._models = models
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        shown_id, work_id = make_request_id(None)
        try:
            last = _last_event(http)
            wanted_id = http.headers.get(REQUEST_ID_HEADER) if last is None else last.origin.request_id
            shown_id, work_id = make_request_id(wanted_id)
            admit(self._models, http)
            tenant = enter_tenant(http)
            with self._models.bodies.hold(tenant) as held:
                data = await received_body(http, self._models.config.max_body_bytes, held)
                answered = self._answer(http, send, data, held, shown_id, work_id, tenant, last)
                del data  # it is decoded, and gone
                await until_disconnect(receive, answered)
            self._models.answered("http", "200", None)
        except ClientDisconnect:
            log.debug("client disconnected", request_id=work_id)
        except Exception as error:
            response = error_response(error, shown_id, self._dialect.error)
            self._models.answered("http", str(response.status_code), error)
            await response(scope, receive, send)

    async def _answer(
        self,
        http: Request,
        send: Send,
        data: bytes,
        held: Hold,
        shown_id: str,
        work_id: str,
        tenant: str,
        last: Bookmark | None,
    ) -> None:
        timeout_s = seconds_of(TIMEOUT_HEADER, http.headers.get(TIMEOUT_HEADER))
        asked, options, prompts, num_bytes, checksum = await self._read(data, tenant, timeout_s)
        del data
        held.become(num_bytes)
        if asked.call.request_id and last is None and http.headers.get(REQUEST_ID_HEADER) is None:
            shown_id, work_id = make_request_id(asked.call.request_id)
        call = self._call(asked, work_id, timeout_s, tenant, http)
        if last is not None:
            if not asked.stream:
                raise InvalidRequestError(LAST_EVENT_HEADER, "needs stream to be true")
            call, options = last.asked_again(call, options, checksum)
        frontend = self._models.of(call.model)
        call, prompts = self._dialect.fit(frontend, call, asked.form, prompts)
        await fetch_images(frontend.fetch_image, prompts, held)
        requests = await self._validate(frontend, call, options, prompts)
        if last is not None:
            requests = await last.begin_recalled(last.cut(requests), frontend.recall)
            log.info("stream goes on", request_id=work_id, behind_event=last.number)
        answer = self._dialect.answer(frontend, asked, options, shown_id, requests)
        streamed = asked.stream
        del asked, prompts  # from here on their tokens and images are enough
        held.become(sum(len(image.url) for request in requests for image in request.images))
        items = generate_all(frontend.generator, requests)
        if streamed:
            origin = Origin.of(shown_id, call.draw, checksum, requests) if last is None else last.origin
            named = self._dialect.named_events
            progress = Progress(origin, last, answer.go_on, named or last is not None or _reads_events(http))
            events = EventStream(send, {REQUEST_ID_HEADER: shown_id}, named)
            if frontend.rests():
                items = _while_waking(items, events, frontend.rests)
            await _send_events(events, items, answer, progress, shown_id)
        else:
            whole = await _collect(items, answer)
            await json_response(whole, headers={REQUEST_ID_HEADER: shown_id})(http.scope, http.receive, send)

    async def _read(self, data: bytes, tenant: str, timeout_s: float | None) -> _Read:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        return await read_soon(self._models.lane, deadline_s, self._weighed, data, tenant)

    def _weighed(self, data: bytes, tenant: str) -> _Read:
        asked, options, prompts = self._dialect.read(data, tenant)
        num_bytes = 0 if len(data) <= FREE_BYTES else sum(map(prompt_bytes, prompts))
        return asked, options, prompts, num_bytes, crc32(data) if asked.stream else 0

    def _call(self, asked: Asked, work_id: str, timeout_s: float | None, tenant: str, http: Request) -> Call:
        """What is asked, with what the request's connection and headers say."""
        return msgspec.structs.replace(
            asked.call,
            request_id=work_id,
            priority=http.scope.get(PRIORITY, asked.call.priority),
            caller=http.scope.get(CALLER, ANYONE),
            tenant=tenant,
            timeout_s=timeout_s,
            first_token_s=seconds_of(FIRST_TOKEN_HEADER, http.headers.get(FIRST_TOKEN_HEADER), per_s=1000),
        )

    async def _validate(
        self, frontend: Frontend, call: Call, options: Options, prompts: Sequence[Prompt]
    ) -> list[GenerateRequest]:
        """Returns one request per prompt."""
        if len(prompts) == 1:
            requests = [await validate(frontend, call, prompts[0], options)]
        else:
            requests = []
            for i, prompt in enumerate(prompts):
                field = call.prompt_fields[i] if call.prompt_fields else f"{call.prompt_field}[{i}]"
                named = {"request_id": f"{call.request_id}-{i}", "prompt_field": field}
                one = msgspec.structs.replace(call, draw=call.draw.of_prompt(i), **named)
                requests.append(await validate(frontend, one, prompt, options))
                await asyncio.sleep(0)  # others need not wait for all prompts of a call
        check_call(options.name_of("prompt_logprobs"), requests)
        return requests


def _last_event(http: Request) -> Bookmark | None:
    """Raises InvalidRequestError."""
    text = http.headers.get(LAST_EVENT_HEADER)
    return Bookmark.read(text, LAST_EVENT_HEADER) if text else None


def _reads_events(http: Request) -> bool:
    """Whether the client expects more of an event than `data:`. Some read nothing else, vLLM's benchmark among them."""
    return EVENT_STREAM in http.headers.get("accept", "")


async def _while_waking(items: Items, events: EventStream, rests: Callable[[], bool]) -> Items:
    """The items. While the first one waits for workers that sleep, the client reads comments."""
    async with aclosing(items):
        first = asyncio.ensure_future(anext(items))
        try:
            while not (await asyncio.wait((first,), timeout=COMMENT_S))[0]:
                if rests():
                    await events.comment(b"waking")
        finally:
            await end_tasks(first)
        yield first.result()
        async for item in items:
            yield item


async def _collect(items: Items, answer: Answer) -> object:
    async with aclosing(items):
        async for item in items:
            if isinstance(item, Finished):
                whole = answer.whole(item)
                if answer.saved is not None:
                    await answer.saved
                return whole
            if answer.of_prompts is not None:
                for _ in answer.of_prompts.add_prompt(item):
                    await asyncio.sleep(0)
            answer.add(item)
    raise AssertionError("a stream without an end")


async def _send_events(events: EventStream, items: Items, answer: Answer, progress: Progress, request_id: str) -> None:
    """An error before the first event is raised; a later one becomes the last event, without `[DONE]`.

    The last event of a choice is written together with the next event, which is the end of the stream as a rule.
    """
    try:
        async with aclosing(items):
            async for item in items:
                if isinstance(item, Finished):
                    for chunk in answer.ending(item):
                        events.add(chunk, progress.next_of_ending())
                elif (piece := progress.take(item)) is not None:
                    if answer.of_prompts is not None:
                        for chunk in answer.of_prompts.prompt_chunks(piece):
                            events.add(chunk, progress.next_bookmark())
                            await events.flush()
                            await asyncio.sleep(0)
                    for chunk in answer.chunks(piece):
                        events.add(chunk, progress.next_bookmark())
                    if piece.finish_reason is None:
                        await events.flush()
        if answer.saved is not None:
            await answer.saved
        events.add_done()
    except Exception as error:
        if not events.begun:
            raise
        events.add(answer.failure(*describe(error, request_id)))
    await events.end()
