"""What the service says of itself: its model, whether it lives and can serve, its metrics."""

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
from router.requests.frontend import Frontend
from runtime.errors import UnknownModelError

Metrics = Callable[[], bytes | Awaitable[bytes]]
Targets = Callable[[], Awaitable[object]]


async def no_targets() -> object:
    return []


class ServicePages:
    def __init__(self, frontend: Frontend, metrics: Metrics, targets: Targets) -> None:
        self._frontend = frontend
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
        model = self._model(request)
        ids = {"first_id": model["id"], "last_id": model["id"], "has_more": False} if "type" in model else {}
        return json_response({"object": "list", "data": [model], **ids})

    async def _retrieve_model(self, request: Request) -> Response:
        wanted, served = request.path_params["model"], self._frontend.model
        if wanted != served:
            return error_response(UnknownModelError(wanted, [served]), make_request_id(None)[0])
        return json_response(self._model(request))

    async def _health(self, request: Request) -> Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """A request that came now would be served."""
        problem = self._frontend.not_ready()
        return json_response({"status": problem or "ready"}, 200 if problem is None else 503)

    async def _show_metrics(self, request: Request) -> Response:
        metrics = self._metrics()
        text = metrics if isinstance(metrics, bytes) else await metrics
        return Response(text, headers={"content-type": prometheus_client.CONTENT_TYPE_LATEST})

    async def _list_targets(self, request: Request) -> Response:
        return json_response(await self._targets())

    def _model(self, request: Request) -> dict[str, Any]:
        """The fields that OpenAI's clients read, and more for Anthropic's."""
        fields: dict[str, Any] = {
            "id": self._frontend.model,
            "object": "model",
            "created": self._frontend.created_s,
            "owned_by": "baton",
            "max_model_len": self._frontend.generator.limits().longest,
        }
        if "anthropic-version" in request.headers:
            created_at = datetime.fromtimestamp(fields["created"], UTC).isoformat()
            fields |= {"type": "model", "display_name": fields["id"], "created_at": created_at}
        return fields
