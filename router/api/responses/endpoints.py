"""`POST /v1/responses`, and what may be asked of a response that is kept."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from router.api.dialects.dialect import Asked, Dialect
from router.api.dialects.json_body import NotHereError
from router.api.dialects.plain_request import enter_tenant
from router.api.dialects.token_count import count_tokens
from router.api.http.errors import ErrorAnswer, ErrorBody, error_response, openai_form
from router.api.http.json_response import encode_json, json_response
from router.api.responses.answer import ResponseAnswer, text_of
from router.api.responses.fields import ResponsesBody, read_responses_body
from router.api.responses.output import InputTokens, OutputItem, Response
from router.api.responses.store import Conversation, ResponseStore
from router.api.responses.tools import INPUT, CalledAs, ClientTools, Warned
from router.api.wishes.held_bytes import held_bytes
from router.api.wishes.sampling_options import Options
from router.api.wishes.tools import plain_call
from router.api.wishes.validation import MAX_MESSAGES, Chat, Prompt, make_request_id
from router.requests.frontend import Frontend, Models
from router.requests.request import GenerateRequest
from router.text.chat_template import Message
from runtime.errors import InvalidRequestError

DESCRIBED = {
    "/v1/responses": ("OpenAI's Responses API; streamed as named events", ResponsesBody, Response),
    "/v1/responses/input_tokens": ("The tokens that a response's prompt would have", ResponsesBody, InputTokens),
}
OFF = "is not supported: router.response_store_bytes is 0, so that nothing is kept; send the whole input"


class _Form(Struct, frozen=True):
    """The facts of a request that its answer needs."""

    about: dict[str, Any]  # fields of the response
    called_as: Mapping[str, CalledAs]
    kept: Conversation | None  # None: nobody goes on from the response


class ResponsesDialect(Dialect):
    named_events = True

    def __init__(self, models: Models, store: ResponseStore) -> None:
        self._models = models
        self._store = store
        self._is_strict = models.config.unknown_fields == "refuse"

    def read(self, data: bytes, tenant: str) -> tuple[Asked, Options, Sequence[Prompt]]:
        """Raises InvalidRequestError."""
        body, unknown = self._decoded(data)
        options = body.options()
        if body.store and not self._store.limit_bytes:
            raise InvalidRequestError("store", OFF)
        tools = body.client_tools()
        chat, conversation, left_out = self._chat(body, tenant, tools)
        about = _about(body, chat, tools, bool(self._store.limit_bytes))
        if warnings := [*unknown, *tools.warnings, *left_out]:
            about["warnings"] = warnings
        form = _Form(about, tools.called_as, conversation if about["store"] else None)
        return body.asked("input", form), options, [chat]

    def _decoded(self, data: bytes) -> tuple[ResponsesBody, Sequence[Warned]]:
        body, unknown = read_responses_body(data, self._is_strict)
        return body, unknown

    def _counted(self, data: bytes, tenant: str) -> tuple[str | None, Chat]:
        body, _ = self._decoded(data)
        return body.model, self._chat(body, tenant, body.client_tools())[0]

    def _chat(
        self, body: ResponsesBody, tenant: str, tools: ClientTools
    ) -> tuple[Chat, Conversation, Sequence[Warned]]:
        """Returns (chat, conversation so far without the instructions, warnings of what the chat leaves out)."""
        turns = body.turns()
        asked = Conversation(turns.messages, turns.argument_chars, held_bytes(turns.messages))
        if body.previous_response_id is not None:
            asked = self._previous(body.previous_response_id, tenant) + asked
        spoken = [] if not body.instructions else [{"role": "system", "content": body.instructions}]
        if (num := len(asked.messages) + len(spoken)) > MAX_MESSAGES:
            raise InvalidRequestError("input", f"makes {num} messages; at most {MAX_MESSAGES} are allowed")
        size = asked.argument_chars + memoryview(body.tools).nbytes + memoryview(body.chat_template_kwargs).nbytes
        messages = [*spoken, *asked.messages]
        chat = Chat(messages, body.template_variables(), size, tools.use, body.thinking_tokens())
        return chat, asked, turns.warnings

    def answer(
        self, frontend: Frontend, asked: Asked, options: Options, request_id: str, requests: Sequence[GenerateRequest]
    ) -> ResponseAnswer:
        form: _Form = asked.form
        sampling = requests[0].sampling[0]
        tenant, draw = requests[0].tenant, requests[0].draw
        response = Response(
            id=f"resp_{draw.secret(tenant)}",  # it lets the tenant go on from here, so nobody else may guess or set it
            created_at=draw.created_s,
            model=frontend.model,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            **form.about,
        )
        if form.kept is None:
            return ResponseAnswer(response, frontend.tokenizer, None, form.called_as)
        begun = self._store.begin(response.id, tenant, form.kept)
        answer = ResponseAnswer(response, frontend.tokenizer, self._keep, form.called_as)
        finalize(answer, self._store.forget_unanswered, response.id, begun).atexit = False  # it may fail
        return answer

    async def count(self, http: Request) -> HttpResponse:
        return await count_tokens(self._models, http, "input", self._counted, InputTokens, openai_form)

    def _previous(self, response_id: str, tenant: str) -> Conversation:
        """Raises InvalidRequestError."""
        if not self._store.limit_bytes:
            raise InvalidRequestError("previous_response_id", OFF)
        stored = self._store.get(response_id, tenant)
        if stored is None:
            find = partial(self._store.find, response_id, tenant)
            raise NotHereError("previous_response_id", self._missing(response_id), find)
        return stored.conversation

    def _missing(self, response_id: str) -> str:
        held = f"for {self._store.ttl_s:g} s at most, in {self._store.limit_bytes} bytes"
        return f"{response_id[:100]!r} is not here: responses with store are kept {held}; send the whole input"

    def _keep(self, response: Response) -> Awaitable[None] | None:
        said = _spoken(response.output)
        argument_chars = sum(len(item.arguments or item.input or "") for item in response.output)
        conversation = Conversation(said, argument_chars, held_bytes(said))
        stored = self._store.finish(response.id, conversation, encode_json(response))
        return None if stored is None else self._store.save(response.id, stored)

    async def retrieve(self, http: Request) -> HttpResponse:
        def stored(response_id: str, tenant: str) -> HttpResponse | None:
            if http.query_params.get("stream") == "true":
                raise InvalidRequestError("stream", "is not supported for a response that is kept; it is told whole")
            found = self._store.get(response_id, tenant)
            return None if found is None else HttpResponse(found.body, media_type="application/json")

        return await self._kept(http, stored)

    async def delete(self, http: Request) -> HttpResponse:
        def deleted(response_id: str, tenant: str) -> HttpResponse | None:
            if not self._store.delete(response_id, tenant):
                return None
            return json_response({"id": response_id, "object": "response.deleted", "deleted": True})

        answered = await self._kept(http, deleted)
        if answered.status_code == 200:
            await self._store.forget(http.path_params["response_id"])
        return answered

    async def _kept(self, http: Request, answer: Callable[[str, str], HttpResponse | None]) -> HttpResponse:
        """`answer`: of a response's id and the tenant; None: the tenant has none of this id."""
        response_id = http.path_params["response_id"]
        try:
            tenant = enter_tenant(http)
            answered = answer(response_id, tenant)
            if answered is None and await self._store.find(response_id, tenant):
                answered = answer(response_id, tenant)
        except InvalidRequestError as error:
            return error_response(error, make_request_id(None)[0])
        if answered is not None:
            return answered
        body = ErrorBody(f"response_id: {self._missing(response_id)}", "invalid_request_error", "response_id")
        return json_response(ErrorAnswer(body), 404)


def _about(body: ResponsesBody, chat: Chat, tools: ClientTools, may_store: bool) -> dict[str, Any]:
    """The fields of a response that repeat what was asked."""
    text, reasoning = body.text, body.reasoning
    form = None if text is None else text.format
    described = {} if form is None else {name: value for name, value in _told(form).items() if name != "type"}
    return {
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "store": may_store and body.store is not False,
        "max_output_tokens": body.max_output_tokens,
        "tools": body.tools.copy() if chat.tools is not None and chat.tools.tools else [],
        "tool_choice": tools.told_choice(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": {"type": "text" if form is None else form.type, **described}},
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "metadata": body.metadata or {},
    }


def _told(given: Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}


def _spoken(output: Sequence[OutputItem]) -> list[Message]:
    """The output as the messages that chat templates know."""
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in output:
        if item.type == "reasoning":
            said["reasoning_content"] = said.get("reasoning_content", "") + text_of(item)
        elif item.type == "message":
            said["content"] += text_of(item)
        else:
            is_custom = item.type == "custom_tool_call"
            arguments = {INPUT: item.input} if is_custom else _object(str(item.arguments))
            called = CalledAs(str(item.name), namespace=item.namespace or None).plain
            said.setdefault("tool_calls", []).append(plain_call(str(item.call_id), called, arguments))
    return [said] if output else []


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; nothing when the model has not written an object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
