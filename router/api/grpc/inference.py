"""The gRPC service `baton.v1.Inference`."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Final, TypeVar
from zlib import crc32

import structlog

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from router.api.grpc.admin import Context
from router.api.grpc.calling import REQUEST_ID_METADATA, STALL_GRACE_S, Calls, deadline_s, left_s
from router.api.grpc.errors import Status
from router.api.grpc.messages import (
    finished_message,
    options_of,
    piece_response,
    prompt_field_of,
    prompt_messages,
    prompt_of,
)
from router.api.resuming.bookmark import Bookmark, Origin
from router.api.resuming.progress import Progress
from router.api.wishes.cache_hints import cache_hint, openai_keeps_s
from router.api.wishes.prompt_logprobs import check_call
from router.api.wishes.validation import IN_PLACE_BYTES, validate
from router.requests.frontend import Frontend, Models
from router.requests.request import Finished, GenerateRequest

RESUME_FROM: Final = "resume_from"
TOKENS_SO_FAR: Final = "tokens_so_far"

log = structlog.get_logger()

T = TypeVar("T")


class InferenceService(pb_grpc.InferenceServicer):
    def __init__(self, models: Models, calls: Calls) -> None:
        self._models = models
        self._calls = calls

    async def Generate(  # noqa: N802 (gRPC's name)
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Writes instead of yielding, so that a cancelled call reaches the generator wherever it waits."""
        with self._calls.running():
            generated = self._generate(request, context)
            del request  # nothing but its tokens is held while they are answered
            failure = await generated
        if failure is not None:
            await context.abort(failure.code, failure.details, tuple(failure.trailing_metadata))

    async def _generate(self, request: pb.GenerateRequest, context: Context) -> Status | None:
        with self._calls.outcome() as outcome:
            resume_from = request.resume_from
            last = Bookmark.read(resume_from, RESUME_FROM) if resume_from else None
            outcome.name(request.request_id if last is None else last.origin.request_id, context)
            shown_id = outcome.shown_id
            keeps_s = openai_keeps_s(None, request.prompt_cache_key)
            call = self._calls.admit(
                context,
                outcome.work_id,
                prompt_field=prompt_field_of(request),
                model=request.model,
                priority=request.priority,
                cache_salt=request.cache_salt,
                hint=cache_hint(request.keep_cache_s, request.drop_cache, *keeps_s),
                timeout_s=left_s(context),
            )
            so_far = [tokens.ids for tokens in request.tokens_so_far]
            request.ClearField(RESUME_FROM)
            request.ClearField(TOKENS_SO_FAR)
            is_long = request.ByteSize() > IN_PLACE_BYTES
            checksum = await self._aside(_checksum, request, context) if is_long else _checksum(request)
            aside = is_long and request.WhichOneof("input") == "chat"
            prompt = await self._aside(prompt_of, request, context) if aside else prompt_of(request)
            options = options_of(request.sampling)
            del request
            if last is not None:
                call, options = last.asked_again(call, options, checksum)
            frontend = self._models.of(call.model)
            wanted = await validate(frontend, call, prompt, options)
            del prompt
            check_call("prompt_logprobs", [wanted])
            if last is not None:
                (wanted,) = last.cut([wanted])
                if so_far:
                    wanted = last.begin(wanted, so_far, TOKENS_SO_FAR, frontend.tokenizer.vocab_size)
                else:
                    (wanted,) = await last.begin_recalled([wanted], frontend.recall)
                log.info("stream goes on", request_id=outcome.work_id, behind_event=last.number)
            origin = Origin.of(shown_id, call.draw, checksum, [wanted]) if last is None else last.origin
            progress = Progress(origin, last)
            await context.send_initial_metadata(((REQUEST_ID_METADATA, shown_id),))
            started = pb.Started(model=frontend.model, prompt_tokens=len(wanted.prompt))
            bookmark = resume_from or progress.last_bookmark()
            await context.write(pb.GenerateResponse(request_id=shown_id, bookmark=bookmark, started=started))
            # The generator ends by itself at the deadline, except while it waits for a client that does not read.
            async with asyncio.timeout_at(wanted.deadline_s + STALL_GRACE_S):
                await _stream(frontend, wanted, progress, shown_id, context)
        return outcome.status

    async def _aside(self, work: Callable[[pb.GenerateRequest], T], request: pb.GenerateRequest, context: Context) -> T:
        """Raises what the work and the side lane raise."""
        return await self._models.lane.run(deadline_s(context), work, request)

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=map(_model, self._models.listed))


def _checksum(request: pb.GenerateRequest) -> int:
    return crc32(request.SerializeToString(deterministic=True))


async def _stream(
    frontend: Frontend, wanted: GenerateRequest, progress: Progress, shown_id: str, context: Context
) -> None:
    reasoning_tokens, tokenizer = 0, frontend.tokenizer
    async with aclosing(frontend.generator.generate(wanted)) as pieces:
        async for item in pieces:
            if isinstance(item, Finished):
                finished = finished_message(item, reasoning_tokens)
                await context.write(pb.GenerateResponse(request_id=shown_id, finished=finished))
            elif (piece := progress.take(item)) is not None:
                reasoning_tokens += piece.reasoning_tokens
                for part in prompt_messages(piece, wanted.prompt, tokenizer):
                    if (bookmark := progress.next_bookmark()) is not None:
                        event = pb.GenerateResponse(request_id=shown_id, bookmark=bookmark, prompt_logprobs=part)
                        await context.write(event)
                    await asyncio.sleep(0)
                if (bookmark := progress.next_bookmark()) is not None:
                    await context.write(piece_response(shown_id, bookmark, piece, tokenizer))


def _model(frontend: Frontend) -> pb.Model:
    limits = frontend.generator.limits()
    return pb.Model(
        id=frontend.model, max_model_len=limits.longest, created_s=frontend.created_s, aliases=frontend.aliases
    )
