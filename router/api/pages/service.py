"""What the service says of itself: its models, whether it lives and can serve, its metrics."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import prometheus_client
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.http.errors import error_response
from router.api.http.json_response import json_response
from router.api.wishes.validation import make_request_id
from router.requests.frontend import Frontend, Models
from runtime.errors import InvalidRequestError

Metrics = Callable[[], bytes | Awaitable[bytes]]
Targets = Callable[[], Awaitable[object]]


async def no_targets() -> object:
    return []


class ServicePages:
    def __init__(self, models: Models, metrics: Metrics, targets: Targets) -> None:
        self._models = models
        self._metrics = metrics
        self._targets = targets

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._list_models),
            Route("/v1/models/{model:path}", self._retrieve_model),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/ready", self._ready),
            Route("/metrics", self._show_metrics),
            Route("/metrics/targets", self._list_targets),
        ]

    async def _list_models(self, request: Request) -> Response:
        models = [_fields(model, request) for model in self._models.listed]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
        return json_response({"object": "list", "data": models, **(ends if "type" in models[0] else {})})

    async def _retrieve_model(self, request: Request) -> Response:
        try:
            return json_response(_fields(self._models.of(request.path_params["model"]), request))
        except InvalidRequestError as error:
            return error_response(error, make_request_id(None)[0])

    async def _health(self, request: Request) -> Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """A request that came now would be served."""
        problem = self._models.not_ready()
        return json_response({"status": problem or "ready"}, 200 if problem is None else 503)

    async def _show_metrics(self, request: Request) -> Response:
        metrics = self._metrics()
        text = metrics if isinstance(metrics, bytes) else await metrics
        return Response(text, headers={"content-type": prometheus_client.CONTENT_TYPE_LATEST})

    async def _list_targets(self, request: Request) -> Response:
        return json_response(await self._targets())


def _fields(model: Frontend, request: Request) -> dict[str, Any]:
    """The fields that OpenAI's clients read, and more for Anthropic's."""
    limits = model.generator.limits()
    fields: dict[str, Any] = {
        "id": model.model,
        "object": "model",
        "created": model.created_s,
        "owned_by": "baton",
        "max_model_len": limits.longest,
        "tasks": sorted(limits.tasks),
        "state": model.state(),
    }
    if limits.dimension:
        fields["dimension"] = limits.dimension
    if model.parent:
        fields["parent"] = model.parent
    if model.aliases:
        fields["aliases"] = list(model.aliases)
    if "anthropic-version" in request.headers:
        created_at = datetime.fromtimestamp(fields["created"], UTC).isoformat()
        fields |= {"type": "model", "display_name": fields["id"], "created_at": created_at}
    return fields
