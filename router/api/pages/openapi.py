"""The HTTP API as OpenAPI 3.1 describes one, made from the types of requests and answers."""

from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.dialects.json_body import ABSENT, unserved_fields
from router.api.http.errors import ErrorAnswer
from router.api.http.json_response import encode_json, json_response
from router.api.messages import output as messages
from router.api.messages.fields import CountBody, MessagesBody
from router.api.openai.chat import ChatCompletion
from router.api.openai.completions import Completion
from router.api.openai.types import ChatBody, CompletionBody
from router.api.pages.tokenization import DetokenizeBody, Text, TokenizeBody, Tokens
from router.api.responses import output as responses
from router.api.responses.fields import ResponsesBody
from runtime.telemetry.metrics import version

POSTS: dict[str, tuple[str, type[Struct], type[Struct]]] = {
    "/v1/chat/completions": ("A chat's next message; streamed as server-sent events", ChatBody, ChatCompletion),
    "/v1/completions": ("The text after a prompt; streamed likewise", CompletionBody, Completion),
    "/v1/responses": ("OpenAI's Responses API; streamed as named events", ResponsesBody, responses.Response),
    "/v1/responses/input_tokens": (
        "The tokens that a response's prompt would have",
        ResponsesBody,
        responses.InputTokens,
    ),
    "/v1/messages": ("Anthropic's Messages API; streamed as named events", MessagesBody, messages.Message),
    "/v1/messages/count_tokens": ("The tokens that a message's prompt would have", CountBody, messages.TokenCount),
    "/tokenize": ("The tokens of a prompt or a chat", TokenizeBody, Tokens),
    "/detokenize": ("The text of tokens", DetokenizeBody, Text),
}
GETS = {
    "/v1/responses/{response_id}": "A response that is kept",
    "/v1/models": "The model that is served",
    "/health": "The process lives",
    "/ready": "A request that came now would be served; else status 503",
    "/version": "Of the service",
    "/metrics": "For Prometheus",
}


@cache
def describe_api(release: str) -> bytes:
    """JSON."""
    described = {kind: _described(kind) for _, *kinds in POSTS.values() for kind in (*kinds, ErrorAnswer)}
    references, schemas = msgspec.json.schema_components(described.values(), ref_template="#/components/schemas/{name}")
    contents = {
        kind: {"application/json": {"schema": reference}} for kind, reference in zip(described, references, strict=True)
    }
    paths: dict[str, Any] = {
        path: {"get": {"summary": summary, "responses": {"200": {"description": "OK"}}}}
        for path, summary in GETS.items()
    }
    for path, (summary, body, answer) in POSTS.items():
        refused = {"description": "Refused or failed", "content": contents[ErrorAnswer]}
        responses = {"200": {"description": "OK", "content": contents[answer]}, "default": refused}
        request = {"required": True, "content": contents[body]}
        paths[path] = {"post": {"summary": summary, "requestBody": request, "responses": responses}}
    keys = {"key": {"type": "http", "scheme": "bearer"}}
    return encode_json(
        {
            "openapi": "3.1.0",
            "info": {"title": "Baton", "version": release},
            "paths": paths,
            "components": {"schemas": schemas, "securitySchemes": keys},
            "security": [{"key": []}, {}],
        }
    )


@cache
def _described(kind: Any) -> Any:
    """The type without the fields that are refused or have no effect."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return reduce(or_, map(_described, arguments))
    if isinstance(origin, type) and ... not in arguments:
        return origin[tuple(map(_described, arguments))]  # type: ignore[index]
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        return kind
    hidden = unserved_fields(kind)
    fields = [
        (field.name, Any, None) if field.default is ABSENT else (field.name, _described(field.type), *_default(field))
        for field in msgspec.structs.fields(kind)
        if field.name not in hidden
    ]
    config = kind.__struct_config__
    return msgspec.defstruct(
        *(kind.__name__, fields),
        module=kind.__module__,  # two types of one name are told apart by it
        kw_only=True,
        forbid_unknown_fields=config.forbid_unknown_fields,
        tag_field=config.tag_field,
        tag=config.tag,
    )


def _default(field: msgspec.structs.FieldInfo) -> tuple[Any, ...]:
    if field.default is not NODEFAULT:
        return (field.default,)
    return () if field.default_factory is NODEFAULT else (msgspec.field(default_factory=field.default_factory),)


async def _openapi(request: Request) -> Response:
    return Response(describe_api(version()), media_type="application/json")


async def _version(request: Request) -> Response:
    return json_response({"version": version()})


ROUTES = (Route("/openapi.json", _openapi), Route("/version", _version))
