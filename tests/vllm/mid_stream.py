"""Requests that lose their decode worker while it answers them."""

import asyncio
from collections.abc import Callable

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer
from tests.service import Service
from tests.vllm.environment import PATIENCE_S


async def killed_in_mid_stream(
    service: Service, requests: list[pb.GenerateRequest], victim: str, kill: Callable[[], None]
) -> list[Answer]:
    """Calls `kill` as soon as one of the requests, which are sent together, has begun to be answered by the victim."""
    begun: asyncio.Queue[str] = asyncio.Queue()

    async def stream(name: str, request: pb.GenerateRequest) -> Answer:
        request.request_id = name
        unseen = [name]

        def note(_: pb.Piece) -> None:
            if unseen:
                begun.put_nowait(unseen.pop())

        return await service.client.generate(request, PATIENCE_S, note)

    asked = [
        asyncio.create_task(stream(f"beside-{victim}-{number}", request)) for number, request in enumerate(requests)
    ]
    async with asyncio.timeout(PATIENCE_S):
        while await decode_worker(service, await begun.get()) != victim:
            pass
    kill()
    answers = await asyncio.gather(*asked)
    assert any(answer.served_by[0].attempts > 1 for answer in answers)
    return answers


async def decode_worker(service: Service, request_id: str) -> str:
    """Of a request that has begun to be answered."""
    hops = (await service.client.explain(pb.ExplainRequest(request_id=request_id), PATIENCE_S)).hops
    return next(hop.worker for hop in reversed(hops) if hop.name == "decode")
