"""The gRPC service `baton.v1.Admin`: an operator's questions to a running router.

Invariant: no question delays requests or changes the router's state. The workers carry out `Sleep`, `Wake` and
`UpdateWeights`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
import structlog

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from router.api.grpc.calling import metadata
from router.api.grpc.errors import status_of
from router.api.grpc.messages import prompt_field_of, prompt_of
from router.api.wishes.sampling_options import check_range
from router.api.wishes.validation import MAX_TIMEOUT_S, tokenize
from router.requests.frontend import Frontend, Models
from router.views.adapters_control import AdaptersControl
from router.views.explain import Explainer
from router.views.sleep_control import SleepControl
from router.views.tree_diff import TreeDiff
from router.views.tree_view import TreeView
from router.views.weights_control import WeightsControl
from router.views.whole_status import of_models
from runtime.errors import BatonError, InvalidRequestError, UnavailableError, shown
from runtime.security.callers import key_name
from runtime.security.grpc_bearer import HEADER
from runtime.security.secret import Secret

DIFF_TIMEOUT_S = 60.0  # for a caller that names no deadline
MAX_LEVEL = 2  # of sleep; 0 stands for 1
ANSWER_SHARE = 0.9  # of the caller's time; the rest is for sending the answer back

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R")
T = TypeVar("T")
StatusSource = Callable[[], Awaitable[pb.StatusResponse]]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Questions:
    """The objects that answer the questions about one model."""

    status: StatusSource
    tree: TreeView
    diff: TreeDiff
    explain: Explainer
    sleep: SleepControl
    weights: WeightsControl
    adapters: AdaptersControl


class AdminService(pb_grpc.AdminServicer):
    def __init__(self, models: Models, questions: Mapping[str, Questions]) -> None:
        """`questions`: by model."""
        self._models = models
        self._questions = questions
        self._sleep = SleepControl.over(one.sleep for one in questions.values())

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802 (gRPC's names)
        asked = self._questions
        if request.model:
            name = (await self._chosen(request.model, context)).base
            asked = {name: asked[name]}
        return of_models(dict(zip(asked, await asyncio.gather(*(one.status() for one in asked.values())), strict=True)))

    async def Tree(self, request: pb.TreeRequest, context: Context) -> AsyncIterator[pb.TreeChunk]:  # noqa: N802
        model = await self._chosen(request.model, context)
        async for chunk in self._questions[model.base].tree.listing(request):
            yield chunk

    async def Diff(self, request: pb.DiffRequest, context: Context) -> AsyncIterator[pb.WorkerDiff]:  # noqa: N802
        left_s = context.time_remaining()
        timeout_s = DIFF_TIMEOUT_S if left_s is None else left_s * ANSWER_SHARE
        model = await self._chosen(request.model, context)
        async with aclosing(self._questions[model.base].diff.compare(request, timeout_s)) as workers:
            async for worker in workers:
                yield worker

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:  # noqa: N802
        subject = request.WhichOneof("subject")
        if subject == "request_id":
            response = None
            for asked_of in self._questions.values():
                response = response or await asked_of.explain.request_anywhere(request.request_id)
            if response is None:
                remembered = sum(one.explain.num_remembered for one in self._questions.values())
                problem = f"no decision for {shown(request.request_id)} among the last {remembered}"
                await context.abort(grpc.StatusCode.NOT_FOUND, f"request_id: {problem}")
            assert response is not None, "abort raises"
            return response
        frontend = await self._chosen(request.model, context)
        asked = pb.GenerateRequest(**({} if subject is None else {subject: getattr(request, subject)}))
        try:
            prompt, field = prompt_of(asked), prompt_field_of(asked)
            tokens = await tokenize(frontend, prompt, field)
        except BatonError as error:
            status = status_of(error, "explain")
            await context.abort(status.code, status.details)
        seed = frontend.hash_seed(request.tenant, request.cache_salt)
        return self._questions[frontend.base].explain.prompt(tokens, seed, frontend.adapter)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:  # noqa: N802
        return await _done(self._sleep.sleep, request, context)

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.SleepResponse:  # noqa: N802
        return await _done(self._sleep.wake, request, context)

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Context) -> pb.UpdateWeightsResponse:  # noqa: N802
        model = await self._chosen(request.served_model, context)
        return await _done(self._questions[model.base].weights.update, request, context)

    async def _chosen(self, name: str, context: Context) -> Frontend:
        """The model that a question is about."""
        try:
            return self._models.of(name)
        except InvalidRequestError as error:
            status = status_of(error, "")
            await context.abort(status.code, status.details)
            raise


async def _done(ask: Callable[[R], Awaitable[T]], request: R, context: Context) -> T:
    """Aborts with INVALID_ARGUMENT for a number that makes no sense, and with FAILED_PRECONDITION and the worker's
    reason when the worker refused."""
    key = Secret((metadata(context, HEADER) or "").partition(" ")[2].strip())
    what = type(request).__name__.removesuffix("Request")
    log.info("an operator asks", what=what, query=str(request)[:200].replace("\n", " "), by=key_name(key))
    try:
        check_range("level", getattr(request, "level", None), 0, MAX_LEVEL)
        check_range("timeout_s", getattr(request, "timeout_s", None), 0.0, MAX_TIMEOUT_S)
        return await ask(request)
    except BatonError as error:
        status = status_of(error, "sleep")
        code = grpc.StatusCode.FAILED_PRECONDITION if isinstance(error, UnavailableError) else status.code
        await context.abort(code, status.details)
        raise
