"""A stream that outlives the router that began it: the answer goes on at whichever router answers next."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

import grpc

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client

PATIENCE_S: Final = 30.0  # for the next piece, when a stream has broken off
FIRST_PATIENCE_S: Final = 5.0  # for the first one: perhaps nobody is at that address
PAUSE_S: Final = 0.1  # between two attempts, of which the former brought nothing
FINAL: Final = "x-request-id"  # in the trailing metadata of errors that another router would tell, too
# What gRPC says of a connection that breaks, and where a proxy between ends a stream whose router has died.
BROKEN: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


async def lasting(
    router: Client, request: pb.GenerateRequest, timeout_s: float | None = None
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """Yields what `router.stream` does, and goes on when it breaks off. `request.resume_from` follows. Closing the
    iterator cancels the request."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    patient_until_s = 0.0
    so_far = [pb.TokenIds() for _ in range(request.sampling.n or 1)]
    while True:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        try:
            async with aclosing(router.stream(request, left_s)) as responses:
                async for response in responses:
                    request.resume_from = response.bookmark or request.resume_from
                    if response.HasField("piece"):
                        patient_until_s = 0.0
                        so_far[response.piece.index].ids.extend(response.piece.token_ids)
                    yield response
            return
        except grpc.aio.AioRpcError as error:
            now_s, pause_s = time.monotonic(), PAUSE_S if patient_until_s else 0.0
            patient_until_s = patient_until_s or now_s + (PATIENCE_S if request.resume_from else FIRST_PATIENCE_S)
            if not _broke_off(error) or now_s > patient_until_s:
                raise
        await asyncio.sleep(pause_s)
        del request.tokens_so_far[:]
        request.tokens_so_far.extend(so_far)


def _broke_off(error: grpc.aio.AioRpcError) -> bool:
    told = error.trailing_metadata() or ()
    return error.code() in BROKEN and all(name != FINAL for name, _ in told)
