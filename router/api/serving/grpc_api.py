"""The router's gRPC server: `baton.v1.Inference`, `baton.v1.Admin` and the Open Inference Protocol, with health and
reflection.

Health is SERVING while a request that came now would be served.
"""

import asyncio
import logging
import threading
from collections.abc import Sequence

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
from router.api.grpc.admin import AdminService, Questions
from router.api.grpc.calling import Calls
from router.api.grpc.connections import GrpcConnections
from router.api.grpc.decoding import DecodeRequests
from router.api.grpc.errors import ours_alone
from router.api.grpc.inference import InferenceService
from router.api.grpc.receiving import Receiving
from router.api.kserve.service import KserveService
from router.requests.frontend import Frontend, Models
from runtime.address import format_address
from runtime.security.bearer_keys import BearerKeys
from runtime.security.failed_logins import API_KEY, OPERATOR_KEY, FailedLogins
from runtime.security.grpc_bearer import SERVER_OPTIONS, RequireBearer
from runtime.security.grpc_server import grpc_server
from runtime.security.keys import OPERATOR_REMEDY
from runtime.security.secret import Secret
from runtime.security.tls import Tls

HEALTH_INTERVAL_S = 0.2
MAX_CONNECTIONS = 4096  # also bounds the threads of gRPC, which wants one for each that has work
CONNECTION_AGE_S = 10.0
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
        others: Sequence[tuple[Frontend, Questions]] = (),
        connection_age_s: float = CONNECTION_AGE_S,
    ) -> None:
        """`Admin` asks for one of `operators`. With `keys`, all else but health asks for one of those. `logins` is told
        of wrong keys. Other processes of this user may listen on the port, too. `others`: further models.
        A client whose connection is older than `connection_age_s` is told to make its next calls on a new one."""
        logging.getLogger("grpc._cython.cygrpc").addFilter(ours_alone)
        self.port = 0
        self.longest_stay_s = 1.1 * connection_age_s + 1.0  # gRPC spreads the ages by a tenth
        models = self._models = Models((frontend, *(model for model, _ in others)))
        self._calls = Calls(models, keys)
        self._health = health.aio.HealthServicer()
        self._connections = GrpcConnections(max_connections, models.bodies.limit_bytes)
        self._tls = tls
        size_limit = ("grpc.max_receive_message_length", models.config.max_body_bytes)
        receiving = Receiving(models.bodies.limit_bytes, models.config.max_body_bytes)
        guards: list[grpc.aio.ServerInterceptor] = [
            RequireBearer(
                BearerKeys.plain(operators), OPERATOR_KEY, prefix=ADMIN, remedy=OPERATOR_REMEDY, logins=logins
            ),
            DecodeRequests(FILES, models.lane, receiving, self._connections, self._calls.enter_tenant),
        ]
        alive = (f"{KSERVE}{method}" for method in ("ServerLive", "ServerReady"))
        elsewhere = [ADMIN, f"/{health.SERVICE_NAME}/", *alive]
        if keys is not None:
            guards.insert(0, RequireBearer(keys, API_KEY, tuple(elsewhere), logins=logins))
        guards += innermost
        places = ("grpc.max_allowed_incoming_connections", max_connections)
        age = ("grpc.max_connection_age_ms", int(1e3 * connection_age_s))
        options = [("grpc.so_reuseport", 1), size_limit, places, age, *SERVER_OPTIONS]
        self._server = grpc_server(options, guards)
        pb_grpc.add_InferenceServicer_to_server(InferenceService(models, self._calls), self._server)
        kserve_grpc.add_GRPCInferenceServiceServicer_to_server(KserveService(models, self._calls), self._server)
        asked = {model.model: about for model, about in ((frontend, questions), *others)}
        pb_grpc.add_AdminServicer_to_server(AdminService(models, asked), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        _add_reflection([*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self._health_watch: asyncio.Task[None] | None = None

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
        self._connections.bound_buffers(self.port)
        await self._show_health()
        await self._server.start()
        self._health_watch = asyncio.create_task(self._watch_health())
        threading.Thread(target=self._connections.watch, args=(self.port,), daemon=True).start()
        return self.port

    async def hand_over(self) -> None:
        """Leaves the port to the other processes that listen on it. Clients that have connected are served until they
        connect anew, the last after `longest_stay_s`. A server of gRPC that is stopped would tell them at once, but
        cancel the calls that are on their way."""
        await asyncio.to_thread(self._connections.leave, self.port)

    async def has_clients(self) -> bool:
        return await asyncio.to_thread(self._connections.any_at, self.port)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Requests in flight have `grace_s` to end, then they are cancelled. The generator decides whether new requests
        are taken meanwhile."""
        self._connections.stop()
        if self._health_watch is not None:
            self._health_watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._calls.until_idle(grace_s)
        await self._server.stop(None)  # only watchers of the health are left, who never end by themselves

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            await self._show_health()

    async def _show_health(self) -> None:
        kinds = health_pb2.HealthCheckResponse
        status = kinds.SERVING if self._models.not_ready() is None else kinds.NOT_SERVING
        for service in ("", *SERVICES):
            await self._health.set(service, status)


def _add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Adds reflection in both versions, whose messages are the same on the wire; the library has v1alpha alone."""
    reflection.enable_server_reflection(services, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(services).ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_registered_method_handlers(REFLECTION_V1, {"ServerReflectionInfo": handler})
