"""The gRPC client of a Baton service. Calls raise `grpc.aio.AioRpcError` with the status code and the words of the
service."""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Self

import grpc

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc
from runtime.calls.answer import Answer, Piece
from runtime.security.grpc_bearer import metadata
from runtime.security.secret import Secret

LONGEST_S = 1e6  # of a call: gRPC takes much longer ones to be over; a router ends each after a day anyway
MAX_CONNECTIONS = 32  # of a client, as it needs them: each takes MAX_STREAMS calls at once
OPTIONS = [
    ("grpc.enable_http_proxy", 0),  # a proxy in the environment must not stand between two processes of one service
    ("grpc.use_local_subchannel_pool", 1),  # a new client never inherits the back-off of an earlier one
    ("grpc.initial_reconnect_backoff_ms", 100),  # another router may have the port already
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a service that comes back is found within 1 s
    ("grpc.max_connections_per_subchannel_cap", MAX_CONNECTIONS),
    ("grpc.service_config", f'{{"connectionScaling": {{"maxConnectionsPerSubchannel": {MAX_CONNECTIONS}}}}}'),
]


class Client:
    """`async with Client("127.0.0.1:8001") as client`.

    `ca`: PEM certificates that vouch for a service that speaks TLS; None: no TLS. `server_name`: the name in the
    service's certificate, if it is not the host of `address`. `operator_key`: for the questions of Admin.
    """

    def __init__(
        self,
        address: str,
        api_key: Secret | None = None,
        ca: bytes | None = None,
        server_name: str | None = None,
        operator_key: Secret | None = None,
    ) -> None:
        self._metadata = metadata(api_key)
        self._operators = metadata(operator_key)
        if ca is None:
            self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            options = [*OPTIONS, ("grpc.ssl_target_name_override", server_name)] if server_name else OPTIONS
            self._channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options=options)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = inference_pb2_grpc.AdminStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def stream(
        self, request: pb.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields Started, the pieces and Finished as they arrive. Closing the iterator cancels the request."""
        limit_s = None if timeout_s is None else min(timeout_s, LONGEST_S)
        call = self._inference.Generate(request, timeout=limit_s, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        finally:
            call.cancel()

    async def generate(
        self,
        request: pb.GenerateRequest,
        timeout_s: float | None = None,
        on_piece: Callable[[Piece], None] = lambda piece: None,
    ) -> Answer:
        """Returns the whole answer. `on_piece` gets each piece as it arrives."""
        answer = Answer()
        start_s = time.monotonic()
        async for response in self.stream(request, timeout_s):
            piece = answer.add(response, time.monotonic() - start_s)
            if piece is not None:
                on_piece(piece)
        return answer

    async def models(self, timeout_s: float | None = None) -> list[pb.Model]:
        call = self._inference.ListModels(pb.ListModelsRequest(), timeout=timeout_s, metadata=self._metadata)
        response: pb.ListModelsResponse = await call
        return list(response.models)

    async def status(self, timeout_s: float | None = None, model: str = "") -> pb.StatusResponse:
        """`model` empty: of all."""
        call = self._admin.Status(pb.StatusRequest(model=model), timeout=timeout_s, metadata=self._operators)
        response: pb.StatusResponse = await call
        return response

    async def tree(
        self, request: pb.TreeRequest, timeout_s: float | None = None
    ) -> tuple[pb.TreeSummary, list[pb.TreeRun]]:
        """The radix tree's runs, each after its parent."""
        summary, runs = pb.TreeSummary(), list[pb.TreeRun]()
        async for chunk in self._admin.Tree(request, timeout=timeout_s, metadata=self._operators):
            if chunk.HasField("summary"):
                summary = chunk.summary
            runs += chunk.runs
        return summary, runs

    async def diff(self, request: pb.DiffRequest, timeout_s: float | None = None) -> list[pb.WorkerDiff]:
        """The router's tree against each worker's own block table."""
        call = self._admin.Diff(request, timeout=timeout_s, metadata=self._operators)
        return [worker async for worker in call]

    async def explain(self, request: pb.ExplainRequest, timeout_s: float | None = None) -> pb.ExplainResponse:
        call = self._admin.Explain(request, timeout=timeout_s, metadata=self._operators)
        response: pb.ExplainResponse = await call
        return response

    async def sleep(self, worker_id: str, level: int = 1, timeout_s: float = 30.0) -> pb.SleepResponse:
        """`timeout_s`: for requests in flight, and again for peers. A worker that stays awake answers
        FAILED_PRECONDITION."""
        request = pb.SleepRequest(worker_id=worker_id, level=level, timeout_s=timeout_s)
        response: pb.SleepResponse = await self._admin.Sleep(request, metadata=self._operators)
        return response

    async def update_weights(
        self, model: str, worker_id: str, timeout_s: float, served_model: str = ""
    ) -> pb.UpdateWeightsResponse:
        """`worker_id` empty: all workers, or none. `served_model`: whose weights, where several are served."""
        request = pb.UpdateWeightsRequest(
            model=model, worker_id=worker_id, timeout_s=timeout_s, served_model=served_model
        )
        response: pb.UpdateWeightsResponse = await self._admin.UpdateWeights(request, metadata=self._operators)
        return response

    async def wake(self, worker_id: str, tags: Sequence[str] = ()) -> pb.SleepResponse:
        request = pb.WakeRequest(worker_id=worker_id, tags=tags)
        response: pb.SleepResponse = await self._admin.Wake(request, metadata=self._operators)
        return response
