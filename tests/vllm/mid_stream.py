"""Requests that lose their decode worker while it answers them."""

import asyncio
import uuid
from collections.abc import Callable, Sequence

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.answer import Answer, Piece
from tests.service import Service
from tests.vllm.environment import PATIENCE_S


async def killed_in_mid_stream(
    service: Service,
    requests: list[pb.GenerateRequest],
    kills: dict[str, Callable[[], None]],
    later: Sequence[str] = (),
) -> tuple[str, list[Answer]]:
    """Sends the requests together and kills the first worker that has begun to answer one, out of those that `kills`
    has a way for. Workers in `later` sleep until then, so that they cannot answer all. Returns the killed worker's id
    and the answers."""
    for worker_id in later:
        await service.client.sleep(worker_id)
    begun: asyncio.Queue[str] = asyncio.Queue()
    name = uuid.uuid4().hex

    async def stream(name: str, request: pb.GenerateRequest) -> Answer:
        request.request_id = name
        unseen = [name]

        def note(_: Piece) -> None:
            if unseen:
                begun.put_nowait(unseen.pop())

        return await service.client.generate(request, PATIENCE_S, note)

    asked = [asyncio.create_task(stream(f"{name}-{number}", request)) for number, request in enumerate(requests)]
    async with asyncio.timeout(PATIENCE_S):
        while (victim := await decode_worker(service, await begun.get())) not in kills:
            pass
    kills[victim]()
    for worker_id in later:
        await service.client.wake(worker_id)
    answers = await asyncio.gather(*asked)
    assert any(answer.served_by[0].attempts > 1 for answer in answers)
    return victim, answers


async def decode_worker(service: Service, request_id: str) -> str:
    """Of a request that has begun to be answered."""
    hops = (await service.client.explain(pb.ExplainRequest(request_id=request_id), PATIENCE_S)).hops
    return next(hop.worker for hop in reversed(hops) if hop.name == "decode")
