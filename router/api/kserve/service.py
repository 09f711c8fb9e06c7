"""The Open Inference Protocol (KServe v2): text and token ids as tensors, for clients that speak it, such as Triton's.

A request becomes what the other APIs make of theirs; nothing of it goes another way to the engine.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import grpc
import grpc.aio
import msgspec

from baton_proto.generated import open_inference_pb2 as pb, open_inference_pb2_grpc as pb_grpc
from router.api.grpc.calling import STALL_GRACE_S, Calls, Outcome, left_s
from router.api.grpc.errors import Status, status_of
from router.api.kserve.infer_request import ANY, INPUTS, OUTPUTS, STREAM, Wish, read_wish
from router.api.kserve.tensors import add_output
from router.api.wishes.sampling_options import Options
from router.api.wishes.validation import validate
from router.requests.frontend import Frontend, Models
from router.requests.request import Finished, GenerateRequest, Piece
from runtime.code_version import code_version
from runtime.errors import BatonError, InvalidRequestError, UnknownModelError, shown

VERSION: Final = "1"
PLATFORM: Final = "baton"
MAX_AT_ONCE: Final = 64  # requests of a stream; further ones are not read
FINAL: Final = "triton_final_response"
NO_OPTIONS: Final = Options(given={})
MAX_ID_CHARS: Final = 128  # of an id that is refused, and told

Context = grpc.aio.ServicerContext[Any, Any]


class KserveService(pb_grpc.GRPCInferenceServiceServicer):
    """Method names are the protocol's."""

    def __init__(self, models: Models, calls: Calls) -> None:
        self._models = models
        self._calls = calls

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:  # noqa: N802
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(  # noqa: N802
        self, request: pb.ServerReadyRequest, context: Context
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._models.not_ready() is None)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:  # noqa: N802
        try:
            return pb.ModelReadyResponse(ready=self._model(request.name, request.version).not_ready() is None)
        except InvalidRequestError:
            return pb.ModelReadyResponse(ready=False)

    async def ServerMetadata(  # noqa: N802
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=PLATFORM, version=code_version())

    async def ModelMetadata(  # noqa: N802
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        try:
            frontend = self._model(request.name, request.version)
        except InvalidRequestError as error:
            await _abort(context, status_of(error, ""))
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=frontend.model,
            versions=[VERSION],
            platform=PLATFORM,
            inputs=[tensor(name=name, datatype=kind, shape=[size]) for name, (kind, size) in INPUTS.items()],
            outputs=[tensor(name=name, datatype=kind, shape=[ANY]) for name, kind in OUTPUTS.items()],
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:  # noqa: N802
        with self._calls.running(), self._calls.outcome() as outcome:
            frontend, wish, wanted = await self._read(request, context, outcome)
            named = request.id
            del request  # nothing but its tokens is held while they are answered
            if wish.stream:
                raise InvalidRequestError(STREAM, "is true, and ModelInfer answers once; ModelStreamInfer streams")
            return await _whole(frontend, named, wish, wanted)
        if outcome.status is not None:
            await _abort(context, outcome.status)
        raise AssertionError("abort raises")

    async def ModelStreamInfer(  # noqa: N802
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> None:
        """Answers every request that it has read. If the server has no room for further messages, the stream then ends
        with the reason."""
        refused: BatonError | None = None
        places, writing = asyncio.Semaphore(MAX_AT_ONCE), asyncio.Lock()
        with self._calls.running():
            async with asyncio.TaskGroup() as group:
                try:
                    async for request in requests:
                        await places.acquire()
                        task = group.create_task(self._answer(request, context, writing))
                        del request
                        task.add_done_callback(lambda _: places.release())
                except BatonError as error:
                    refused = error
        if refused is not None:
            await _abort(context, status_of(refused, ""))

    async def _answer(self, request: pb.ModelInferRequest, context: Context, writing: asyncio.Lock) -> None:
        """One request of a stream."""
        named, model = request.id, request.model_name

        async def write(response: pb.ModelInferResponse) -> None:
            async with writing:
                await context.write(pb.ModelStreamInferResponse(infer_response=response))

        with self._calls.outcome() as outcome:
            frontend, wish, wanted = await self._read(request, context, outcome)
            del request  # nothing but its tokens is held while they are answered
            async with asyncio.timeout_at(wanted.deadline_s + STALL_GRACE_S):
                if not wish.stream:
                    await write(_last(await _whole(frontend, named, wish, wanted), final=not wish.empty_final))
                else:
                    await _pieces(frontend, named, wish, wanted, write)
                if wish.empty_final:
                    await write(_last(_response(frontend.model, named), final=True))
        if outcome.status is not None:
            response = _response(model[:MAX_ID_CHARS], named[:MAX_ID_CHARS])
            failed = pb.ModelStreamInferResponse(error_message=outcome.status.details, infer_response=response)
            with contextlib.suppress(grpc.aio.InternalError):
                async with writing:
                    await context.write(failed)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _read(
        self, request: pb.ModelInferRequest, context: Context, outcome: Outcome
    ) -> tuple[Frontend, Wish, GenerateRequest]:
        """Raises what validation raises. The wish comes without its prompt and its options, which may be long."""
        outcome.name(request.id, context, "id")
        frontend = self._model(request.model_name, request.model_version)
        wish = read_wish(request, frontend.generator.limits().max_model_len)
        timeouts_s = [limit for limit in (left_s(context), wish.timeout_s) if limit is not None]
        call = self._calls.admit(
            context,
            outcome.work_id,
            prompt_field=wish.prompt_field,
            model=request.model_name,
            timeout_s=min(timeouts_s) if timeouts_s else None,
        )
        wanted = await validate(frontend, call, wish.prompt, wish.options)
        return frontend, msgspec.structs.replace(wish, prompt="", options=NO_OPTIONS), wanted

    def _model(self, name: str, wanted: str) -> Frontend:
        """Raises UnknownModelError and InvalidRequestError."""
        if not name:
            raise UnknownModelError(name, self._models.names)
        frontend = self._models.of(name)
        if wanted not in ("", VERSION):
            raise InvalidRequestError("model_version", f"is {shown(wanted)}; there is {VERSION} alone")
        return frontend


def _last(response: pb.ModelInferResponse, *, final: bool) -> pb.ModelInferResponse:
    """Says whether it is the last one of its request, as Triton does."""
    response.parameters[FINAL].bool_param = final
    return response


async def _abort(context: Context, status: Status) -> None:
    await context.abort(status.code, status.details, tuple(status.trailing_metadata))


async def _whole(frontend: Frontend, request_id: str, wish: Wish, wanted: GenerateRequest) -> pb.ModelInferResponse:
    num_choices = len(wanted.sampling)
    texts, ids, reasons = [""] * num_choices, [list[int]() for _ in range(num_choices)], [""] * num_choices
    async with aclosing(frontend.generator.generate(wanted)) as pieces:
        async for item in pieces:
            if isinstance(item, Piece):
                texts[item.index] += item.text
                ids[item.index] += item.token_ids
                reasons[item.index] = item.finish_reason or ""
    return _filled(frontend.model, request_id, wish, texts, reasons, ids)


async def _pieces(frontend: Frontend, request_id: str, wish: Wish, wanted: GenerateRequest, write: Any) -> None:
    left = len(wanted.sampling)
    async with aclosing(frontend.generator.generate(wanted)) as pieces:
        async for item in pieces:
            if isinstance(item, Finished) or not (item.text or item.token_ids or item.finish_reason):
                continue
            left -= item.finish_reason is not None
            response = _filled(
                frontend.model, request_id, wish, [item.text], [item.finish_reason or ""], [item.token_ids]
            )
            response.parameters["index"].int64_param = item.index
            await write(_last(response, final=not left and not wish.empty_final))


def _response(model: str, request_id: str) -> pb.ModelInferResponse:
    return pb.ModelInferResponse(model_name=model, model_version=VERSION, id=request_id)


def _filled(
    model: str, request_id: str, wish: Wish, texts: list[str], reasons: list[str], ids: list[list[int]]
) -> pb.ModelInferResponse:
    response = _response(model, request_id)
    flat = [token_id for one in ids for token_id in one]
    values: dict[str, list[Any]] = dict(zip(OUTPUTS, (texts, reasons, flat, [*map(len, ids)]), strict=True))
    for name, datatype in OUTPUTS.items():
        if name in wish.outputs:
            add_output(response, name, datatype, values[name])
    return response
