"""`python -m tests.router.answering_worker WORKER_ID`: a scripted worker in a process of its own, which answers all at
once until its input ends."""

import asyncio
import sys

from baton_proto.worker import Submit
from tests.router.scripted_worker import ScriptedWorker, answer_until


async def main(worker_id: str) -> None:
    gathered = asyncio.Event()

    async def script(worker: ScriptedWorker, submit: Submit) -> None:
        """The answers of requests that come together come together."""
        gathered.clear()
        asyncio.get_running_loop().call_later(0.2, gathered.set)
        await gathered.wait()
        await answer_until(worker, submit, None)

    async with ScriptedWorker(worker_id, script=script) as worker:
        print(worker.address, worker.stream_address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
