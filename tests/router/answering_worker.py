"""`python -m tests.router.answering_worker WORKER_ID`: a scripted worker in a process of its own, which answers all
requests step by step until its input ends."""

import asyncio
import sys

from baton_proto.token_counts import TokenCounts
from baton_proto.worker import Delta, StepMessage, Submit
from tests.router.scripted_worker import ScriptedWorker

STEP_S = 0.05
TOKEN = 40


class Batch:
    def __init__(self) -> None:
        self._left: dict[str, int] = {}  # tokens
        self._new: list[Submit] = []

    async def take(self, worker: ScriptedWorker, submit: Submit) -> None:
        self._new.append(submit)

    def step(self) -> list[Delta]:
        """A token of each."""
        deltas = [self._next(request_id, left) for request_id, left in self._left.items()]
        self._left = {request_id: left - 1 for request_id, left in self._left.items() if left > 1}
        new, self._new = self._new, []
        for submit in new:
            deltas.append(self._next(submit.request_id, submit.sampling.max_tokens, counts=TokenCounts()))
            if submit.sampling.max_tokens > 1:
                self._left[submit.request_id] = submit.sampling.max_tokens - 1
        return deltas

    def _next(self, request_id: str, left: int, counts: TokenCounts | None = None) -> Delta:
        return Delta(request_id, [TOKEN], prompt_counts=counts, finish="length" if left == 1 else None)


async def main(worker_id: str) -> None:
    batch, ended = Batch(), asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    async with ScriptedWorker(worker_id, script=batch.take) as worker:
        print(worker.address, worker.stream_address, flush=True)
        while not ended.done():
            await asyncio.wait((ended,), timeout=STEP_S)
            if deltas := batch.step():
                worker.send_any(StepMessage(deltas, worker.load))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
