"""The router's gRPC server: `baton.v1.Inference`, `baton.v1.Admin` and the Open Inference Protocol, with health and
reflection.

Health is SERVING while a request that came now would be served.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from baton_proto.generated import (
    inference_pb2 as pb,
    inference_pb2_grpc as pb_grpc,
    open_inference_pb2 as kserve,
    open_inference_pb2_grpc as kserve_grpc,
)
from router.api.grpc.admin import AdminService, Context, Questions
from router.api.grpc.calling import REQUEST_ID_METADATA, STALL_GRACE_S, Calls, metadata
from router.api.grpc.connections import GrpcConnections
from router.api.grpc.decoding import DecodeRequests
from router.api.grpc.errors import Status, ours_alone, spare, status_of
from router.api.grpc.kserve import KserveService
from router.api.grpc.messages import (
    finished_message,
    options_of,
    piece_response,
    prompt_field_of,
    prompt_messages,
    prompt_of,
)
from router.api.grpc.receiving import Receiving
from router.api.http.openai_fields import longest_keep_s, session_keep_s
from router.api.prompts.logprobs import check_call
from router.api.validation import IN_PLACE_BYTES, Prompt, make_request_id, validate
from router.requests.fan_out import pieces_of
from router.requests.frontend import Frontend
from router.requests.request import Finished, GenerateRequest
from runtime.address import format_address
from runtime.security.bearer_keys import BearerKeys
from runtime.security.failed_logins import FailedLogins
from runtime.security.grpc_bearer import SERVER_OPTIONS, RequireBearer
from runtime.security.grpc_server import grpc_server
from runtime.security.keys import OPERATOR_REMEDY
from runtime.security.secret import Secret
from runtime.security.tls import Tls

HEALTH_INTERVAL_S = 0.2
MAX_CONNECTIONS = 4096
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
ADMIN = "/baton.v1.Admin/"
KSERVE = "/inference.GRPCInferenceService/"
FILES = (pb.DESCRIPTOR, kserve.DESCRIPTOR)
SERVICES = [service.full_name for file in FILES for service in file.services_by_name.values()]

log = structlog.get_logger()


class GrpcApi:
    """The running server."""

    def __init__(
        self,
        frontend: Frontend,
        questions: Questions,
        keys: BearerKeys | None = None,
        tls: Tls | None = None,
        operators: Sequence[Secret] = (),
        innermost: Sequence[grpc.aio.ServerInterceptor] = (),
        max_connections: int = MAX_CONNECTIONS,
        logins: FailedLogins | None = None,
    ) -> None:
        """`Admin` asks for one of `operators`. With `keys`, all else but health asks for one of those. `logins` is told
        of wrong keys."""
        logging.getLogger("grpc._cython.cygrpc").addFilter(ours_alone)
        self.port = 0
        self._frontend = frontend
        self._calls = Calls(frontend, keys)
        self._health = health.aio.HealthServicer()
        self._connections = GrpcConnections(max_connections)
        self._tls = tls
        size_limit = ("grpc.max_receive_message_length", frontend.max_body_bytes)
        receiving = Receiving(frontend.bodies.limit_bytes, frontend.max_body_bytes)
        guards: list[grpc.aio.ServerInterceptor] = [
            RequireBearer(
                BearerKeys.plain(operators), "operator key", prefix=ADMIN, remedy=OPERATOR_REMEDY, logins=logins
            ),
            DecodeRequests(FILES, frontend.lane, receiving, self._connections, self._calls.enter_tenant),
        ]
        alive = (f"{KSERVE}{method}" for method in ("ServerLive", "ServerReady"))
        elsewhere = [ADMIN, f"/{health.SERVICE_NAME}/", *alive]
        if keys is not None:
            guards.insert(0, RequireBearer(keys, "API key", tuple(elsewhere), logins=logins))
        guards += innermost
        places = ("grpc.max_allowed_incoming_connections", max_connections)
        options = [("grpc.so_reuseport", 0), size_limit, places, *SERVER_OPTIONS]
        self._server = grpc_server(options, guards)
        pb_grpc.add_InferenceServicer_to_server(InferenceService(frontend, self._calls), self._server)
        kserve_grpc.add_GRPCInferenceServiceServicer_to_server(KserveService(frontend, self._calls), self._server)
        pb_grpc.add_AdminServicer_to_server(AdminService(frontend, questions), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        _add_reflection([*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> int:
        """Returns the port; 0 takes a free one. Raises OSError when the address cannot be used."""
        address = format_address(host, port)
        try:
            if self._tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._tls.grpc_server_credentials())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        await self._show_health()
        await self._server.start()
        crowd = self._connections.watch(self.port)
        self._watches = [asyncio.create_task(watch) for watch in (self._watch_health(), crowd)]
        return self.port

    async def stop(self, grace_s: float = 0.0) -> None:
        """Requests in flight have `grace_s` to end, then they are cancelled. The generator decides whether new requests
        are taken meanwhile."""
        for watch in self._watches:
            watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._calls.until_idle(grace_s)
        await self._server.stop(None)  # only watchers of the health are left, who never end by themselves

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            await self._show_health()

    async def _show_health(self) -> None:
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if self._frontend.not_ready() is None else kinds.NOT_SERVING
        for service in ("", *SERVICES):
            await self._health.set(service, status)


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
        shown_id, work_id = make_request_id(None)
        try:
            shown_id, work_id = make_request_id(request.request_id or metadata(context, REQUEST_ID_METADATA))
            call = self._calls.admit(
                context,
                work_id,
                prompt_field=prompt_field_of(request),
                model=request.model,
                priority=request.priority,
                cache_salt=request.cache_salt,
                keep_cache_s=longest_keep_s(request.keep_cache_s, session_keep_s(request.prompt_cache_key)),
                drop_cache=request.drop_cache,
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
        except TimeoutError:
            spare(log.warning, "client does not read its answer", request_id=work_id)
            return Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the answer was not read in time")
        except grpc.aio.InternalError:
            return None  # the caller left while we wrote
        except Exception as error:
            status = status_of(error, shown_id)
            self._frontend.answered("grpc", status.code.name, error)
            return status
        self._frontend.answered("grpc", grpc.StatusCode.OK.name, None)
        return None

    async def _prompt(self, request: pb.GenerateRequest, context: Context) -> Prompt:
        """Raises InvalidRequestError, and what the side lane raises."""
        if request.ByteSize() <= IN_PLACE_BYTES or request.WhichOneof("input") != "chat":
            return prompt_of(request)
        left_s = context.time_remaining()
        deadline_s = None if left_s is None else time.monotonic() + left_s
        return await self._frontend.lane.run(deadline_s, prompt_of, request)

    async def _stream(self, wanted: GenerateRequest, shown_id: str, context: Context) -> None:
        reasoning_tokens = 0
        async with aclosing(pieces_of(self._frontend.generator, wanted)) as pieces:
            async for item in pieces:
                if isinstance(item, Finished):
                    finished = finished_message(item, reasoning_tokens)
                    event = pb.GenerateResponse(request_id=shown_id, finished=finished)
                else:
                    reasoning_tokens += 0 if item.parsed is None else item.parsed.reasoning_tokens
                    for part in prompt_messages(item, wanted.prompt, self._frontend.tokenizer):
                        await context.write(pb.GenerateResponse(request_id=shown_id, prompt_logprobs=part))
                        await asyncio.sleep(0)
                    event = piece_response(shown_id, item, self._frontend.tokenizer)
                await context.write(event)

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        limits = self._frontend.generator.limits()
        model = pb.Model(
            id=self._frontend.model, max_model_len=limits.max_model_len, created_s=self._frontend.created_s
        )
        return pb.ListModelsResponse(models=[model])


def _add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Of both versions, whose messages are the same on the wire; the library has v1alpha alone."""
    reflection.enable_server_reflection(services, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(services).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_registered_method_handlers(REFLECTION_V1, {"ServerReflectionInfo": handler})
