"""One HTTP request for text, from its body to its last event. The two OpenAI endpoints differ in their types alone."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from router.api.http.body import BodyBudget, received_body
from router.api.http.disconnect import until_disconnect
from router.api.http.errors import describe, error_response
from router.api.http.json_body import read_body, read_soon
from router.api.http.json_response import json_response
from router.api.http.openai_answer import Answer, Heading, usage_of
from router.api.http.openai_types import GenerationBody
from router.api.http.server_sent_events import EventStream
from router.api.prompts.logprobs import check_call
from router.api.prompts.shown import NO_WISH, PromptWish, ShownPrompt
from router.api.sampling_options import Options, check_range
from router.api.validation import MAX_TIMEOUT_S, Call, Prompt, make_request_id, tenant_of, validate
from router.requests.fan_out import generate_all
from router.requests.frontend import Frontend
from router.requests.request import Finished, GenerateRequest, Piece
from runtime.errors import InvalidRequestError
from runtime.security.callers import ANYONE

REQUEST_ID_HEADER = "x-request-id"
TIMEOUT_HEADER = "x-request-timeout-s"
CALLER = "baton.caller"  # who shows the key of a request; a key of its scope
TENANT_HEADER = "x-baton-tenant"

Items = AsyncGenerator[Piece | Finished, None]

log = structlog.get_logger()


class GenerationEndpoint:
    """An ASGI application, because it watches the connection while it generates."""

    def __init__(
        self,
        frontend: Frontend,
        bodies: BodyBudget,
        body: type[GenerationBody],
        answer: type[Answer],
        prefix: str,
    ) -> None:
        self._frontend = frontend
        self._bodies = bodies
        self._body = body
        self._answer = answer
        self._prefix = prefix  # of the answer's id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        shown_id, work_id = make_request_id(None)
        try:
            shown_id, work_id = make_request_id(http.headers.get(REQUEST_ID_HEADER))
            self._frontend.rate_limits.account(scope.get(CALLER, ANYONE)).admit()
            timeout_s = _timeout_s(http)
            with self._bodies.hold() as held:
                data = await received_body(http, self._frontend.max_body_bytes, held)
                body, options, prompts = await self._read(data, timeout_s)
                requests = await self._validate(body, options, prompts, work_id, timeout_s, http)
                answer = self._new_answer(body, options, shown_id, requests)
                shows = self._show_prompts(answer, body.wish(), requests, prompts)
                streamed, include_usage = body.stream, body.include_usage
                del data, body, prompts  # from here on their tokens are enough
            items = generate_all(self._frontend.generator, requests)
            if streamed:
                events = EventStream(send, {REQUEST_ID_HEADER: shown_id})
                if shows:
                    items = _prompts_first(items, lambda piece: _send_prompt(events, answer, piece))
                sending = _send_events(events, items, answer, include_usage, shown_id)
                await until_disconnect(receive, sending)
            else:
                if shows:
                    items = _prompts_first(items, lambda piece: _add_prompt(answer, piece))
                whole = await until_disconnect(receive, _collect(items, answer))
                await json_response(whole, headers={REQUEST_ID_HEADER: shown_id})(scope, receive, send)
            self._frontend.answered("http", "200", None)
        except ClientDisconnect:
            log.debug("client disconnected", request_id=work_id)
        except Exception as error:
            response = error_response(error, shown_id)
            self._frontend.answered("http", str(response.status_code), error)
            await response(scope, receive, send)

    async def _read(self, data: bytes, timeout_s: float | None) -> tuple[GenerationBody, Options, Sequence[Prompt]]:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        return await read_soon(self._frontend.lane, deadline_s, read_body, data, self._body)

    async def _validate(
        self,
        body: GenerationBody,
        options: Options,
        prompts: Sequence[Prompt],
        work_id: str,
        timeout_s: float | None,
        http: Request,
    ) -> list[GenerateRequest]:
        """One request per prompt."""
        requests = []
        caller = http.scope.get(CALLER, ANYONE)
        tenant = tenant_of(caller, TENANT_HEADER, http.headers.get(TENANT_HEADER))
        for position, prompt in enumerate(prompts):
            alone = len(prompts) == 1
            request_id = work_id if alone else f"{work_id}-{position}"
            call = Call(
                request_id=request_id,
                prompt_field=body.prompt_field if alone else f"{body.prompt_field}[{position}]",
                model=body.model,
                priority=body.priority or 0,
                caller=caller,
                tenant=tenant,
                cache_salt=body.cache_salt or "",
                keep_cache_s=body.keep_s,
                drop_cache=bool(body.drop_cache),
                timeout_s=timeout_s,
            )
            requests.append(await validate(self._frontend, call, prompt, options))
            if not alone:
                await asyncio.sleep(0)  # others need not wait for all prompts of a call
        check_call(options.name_of("prompt_logprobs"), requests)
        return requests

    def _new_answer(
        self, body: GenerationBody, options: Options, shown_id: str, requests: list[GenerateRequest]
    ) -> Answer:
        heading = Heading.new(self._prefix, shown_id, self._frontend.model)
        num_choices = sum(len(request.sampling) for request in requests)
        with_logprobs = "logprobs" in options.given
        return self._answer(heading, self._frontend.tokenizer, num_choices, with_logprobs, body.include_usage)

    def _show_prompts(
        self, answer: Answer, wish: PromptWish, requests: list[GenerateRequest], prompts: Sequence[Prompt]
    ) -> bool:
        """Whether the answer shows its prompts, choice by choice."""
        if wish is NO_WISH:
            return False
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        answer.show_prompts(
            [
                ShownPrompt(self._frontend.tokenizer, request.prompt, text, wish)
                for request, text in zip(requests, texts, strict=True)
                for _ in request.sampling
            ]
        )
        return True


async def _prompts_first(items: Items, show: Callable[[Piece], Awaitable[None]]) -> Items:
    async with aclosing(items):
        async for item in items:
            if not isinstance(item, Finished):
                await show(item)
            yield item


async def _send_prompt(events: EventStream, answer: Answer, piece: Piece) -> None:
    for chunk in answer.prompt_chunks(piece):
        events.add(chunk)
        await events.flush()
        await asyncio.sleep(0)


async def _add_prompt(answer: Answer, piece: Piece) -> None:
    for _ in answer.add_prompt(piece):
        await asyncio.sleep(0)


async def _collect(items: Items, answer: Answer) -> object:
    async with aclosing(items):
        async for item in items:
            if isinstance(item, Finished):
                return answer.whole(usage_of(item))
            answer.add(item)
    raise AssertionError("a stream without an end")


async def _send_events(events: EventStream, items: Items, answer: Answer, include_usage: bool, request_id: str) -> None:
    """An error before the first event is raised; a later one becomes the last event, without `[DONE]`.

    The last event of a choice is written together with the next event, which is the end of the stream as a rule.
    """
    try:
        async with aclosing(items):
            async for item in items:
                if not isinstance(item, Finished):
                    for chunk in answer.chunks(item):
                        events.add(chunk)
                    if item.finish_reason is None:
                        await events.flush()
                elif include_usage:
                    events.add(answer.usage_chunk(usage_of(item)))
        events.add_done()
    except Exception as error:
        if not events.begun:
            raise
        _, described = describe(error, request_id)
        events.add(described)
    await events.end()


def _timeout_s(http: Request) -> float | None:
    text = http.headers.get(TIMEOUT_HEADER)
    try:
        return check_range(TIMEOUT_HEADER, None if text is None else float(text), 0.0, MAX_TIMEOUT_S, open_below=True)
    except ValueError as error:
        raise InvalidRequestError(TIMEOUT_HEADER, f"is {text!r}, must be a number of seconds") from error
