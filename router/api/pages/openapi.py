"""The HTTP API as OpenAPI 3.1 describes one, made from the types of requests and answers."""

from collections.abc import Callable, Mapping
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
from runtime.code_version import code_version

Described = tuple[str, type[Struct], type[Struct]]
"""(summary, body, answer) of a path."""
GETS = {
    "/v1/responses/{response_id}": "A response that is kept",
    "/v1/files": "The files that callers have brought, and those of batches",
    "/v1/files/{id}": "One of them",
    "/v1/files/{id}/content": "What it holds",
    "/v1/batches/{id}": "A batch: its state, and how far it is",
    "/v1/models": "The model that is served",
    "/health": "The process lives",
    "/ready": "A request that came now would be served; else status 503",
    "/version": "Of the service",
    "/metrics": "For Prometheus",
}


def describe_api(release: str, posts: Mapping[str, Described]) -> bytes:
    """`posts`: path -> what is sent there and answered. Returns JSON."""
    described = {kind: _described(kind) for _, *kinds in posts.values() for kind in (*kinds, ErrorAnswer)}
    references, schemas = msgspec.json.schema_components(described.values(), ref_template="#/components/schemas/{name}")
    contents = {
        kind: {"application/json": {"schema": reference}} for kind, reference in zip(described, references, strict=True)
    }
    paths: dict[str, Any] = {
        path: {"get": {"summary": summary, "responses": {"200": {"description": "OK"}}}}
        for path, summary in GETS.items()
    }
    for path, (summary, body, answer) in posts.items():
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
        kind.__name__,
        fields,
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


def openapi_routes(posts: Callable[[], Mapping[str, Described]]) -> list[Route]:
    described = cache(lambda: describe_api(code_version(), posts()))

    async def openapi(request: Request) -> Response:
        return Response(described(), media_type="application/json")

    async def show_version(request: Request) -> Response:
        return json_response({"version": code_version()})

    return [Route("/openapi.json", openapi), Route("/version", show_version)]
