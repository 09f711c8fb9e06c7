"""The gRPC service `baton.v1.Inference`."""

import asyncio
import time
from contextlib import aclosing

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from router.api.grpc.admin import Context
from router.api.grpc.calling import REQUEST_ID_METADATA, STALL_GRACE_S, Calls
from router.api.grpc.errors import Status
from router.api.grpc.messages import (
    finished_message,
    options_of,
    piece_response,
    prompt_field_of,
    prompt_messages,
    prompt_of,
)
from router.api.wishes.cache_hints import cache_hint, openai_keeps_s
from router.api.wishes.prompt_logprobs import check_call
from router.api.wishes.validation import IN_PLACE_BYTES, Prompt, validate
from router.requests.frontend import Frontend
from router.requests.request import Finished, GenerateRequest


class InferenceService(pb_grpc.InferenceServicer):
    def __init__(self, frontend: Frontend, calls: Calls) -> None:
        self._frontend = frontend
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
            outcome.name(request.request_id, context)
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
                timeout_s=context.time_remaining(),
            )
            prompt, options = await self._prompt(request, context), options_of(request.sampling)
            del request
            wanted = await validate(self._frontend, call, prompt, options)
            del prompt
            check_call("prompt_logprobs", [wanted])
            await context.send_initial_metadata(((REQUEST_ID_METADATA, shown_id),))
            started = pb.Started(model=self._frontend.model, prompt_tokens=len(wanted.prompt))
            await context.write(pb.GenerateResponse(request_id=shown_id, started=started))
            # The generator ends by itself at the deadline, except while it waits for a client that does not read.
            async with asyncio.timeout_at(wanted.deadline_s + STALL_GRACE_S):
                await self._stream(wanted, shown_id, context)
        return outcome.status

    async def _prompt(self, request: pb.GenerateRequest, context: Context) -> Prompt:
        """Raises InvalidRequestError, and what the side lane raises."""
        if request.ByteSize() <= IN_PLACE_BYTES or request.WhichOneof("input") != "chat":
            return prompt_of(request)
        left_s = context.time_remaining()
        deadline_s = None if left_s is None else time.monotonic() + left_s
        return await self._frontend.lane.run(deadline_s, prompt_of, request)

    async def _stream(self, wanted: GenerateRequest, shown_id: str, context: Context) -> None:
        reasoning_tokens = 0
        async with aclosing(self._frontend.generator.generate(wanted)) as pieces:
            async for item in pieces:
                if isinstance(item, Finished):
                    finished = finished_message(item, reasoning_tokens)
                    event = pb.GenerateResponse(request_id=shown_id, finished=finished)
                else:
                    reasoning_tokens += item.reasoning_tokens
                    for part in prompt_messages(item, wanted.prompt, self._frontend.tokenizer):
                        await context.write(pb.GenerateResponse(request_id=shown_id, prompt_logprobs=part))
                        await asyncio.sleep(0)
                    event = piece_response(shown_id, item, self._frontend.tokenizer)
                await context.write(event)

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        limits = self._frontend.generator.limits()
        model = pb.Model(id=self._frontend.model, max_model_len=limits.longest, created_s=self._frontend.created_s)
        return pb.ListModelsResponse(models=[model])
