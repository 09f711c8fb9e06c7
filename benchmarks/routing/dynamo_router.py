"""Dynamo's KvRouter with a given number of workers, each a process that has announced the whole prompt.

Runs in the peer's environment. The workers idle: only the router's decision is timed.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from dynamo.llm import KvRouter, KvRouterConfig  # type: ignore[import-not-found]
from dynamo.runtime import DistributedRuntime  # type: ignore[import-not-found]

from benchmarks.routing.inputs import BLOCK_SIZE, MAX_TOKENS, read_tokens

ENDPOINT = "benchmark.backend.generate"
READY_TIMEOUT_S = 30.0


class DynamoRouter:
    def __init__(self, folder: Path, num_workers: int, loop: str) -> None:
        """Returns when the router has seen the prompt on every worker. `loop`: "uvloop" or "asyncio"."""
        self._tokens: list[int] = read_tokens(folder, MAX_TOKENS).tolist()
        self._discovery = tempfile.TemporaryDirectory(prefix="dynamo-discovery-")
        os.environ["DYN_FILE_KV"] = self._discovery.name
        self._loop = uvloop.new_event_loop() if loop == "uvloop" else asyncio.new_event_loop()
        self._log = Path(self._discovery.name) / "workers.log"
        self._workers = [self._worker(folder) for _ in range(num_workers)]
        self._loop.run_until_complete(self._start())

    def decide(self, num_tokens: int, budget_s: float) -> dict[str, Any]:
        """Times whole decisions: hash, match, select, charge. Freeing the charge is not timed."""
        return self._loop.run_until_complete(self._decide(self._tokens[:num_tokens], budget_s))

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self._runtime.shutdown()
        self._discovery.cleanup()

    async def _start(self) -> None:
        self._runtime = DistributedRuntime(self._loop, "file", "tcp", event_plane="zmq")
        endpoint = self._runtime.endpoint(ENDPOINT)
        for worker in self._workers:
            self._await_line(worker, "UP")
        client = await endpoint.client()
        self._router = KvRouter(endpoint, BLOCK_SIZE, KvRouterConfig())
        await self._until(lambda: self._sees(client))
        await asyncio.sleep(1.0)  # because its event subscriptions connect in the background
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write("publish\n")
            worker.stdin.flush()
        await self._until(self._all_hold_the_prompt)

    async def _decide(self, tokens: list[int], budget_s: float) -> dict[str, Any]:
        clock = time.perf_counter_ns
        samples: list[float] = []
        end_ns = clock() + int(budget_s * 1e9)
        begin_ns = clock()
        cached = 0
        while begin_ns < end_ns or len(samples) < 5:
            request_id = f"request-{begin_ns}"
            begin_ns = clock()
            _, _, cached = await self._router.best_worker(tokens, request_id=request_id)
            samples.append((clock() - begin_ns) / 1e3)
            await self._router.free(request_id)
        # For a fully cached prompt we count one block less, because its last token must be computed anyway.
        return {"us": samples, "check": min(cached, (len(tokens) - 1) // BLOCK_SIZE)}

    async def _sees(self, client: Any) -> bool:
        return len(client.instance_ids()) == len(self._workers)

    async def _all_hold_the_prompt(self) -> bool:
        overlap = await self._router.get_overlap_scores(self._tokens)
        held = [worker["device_blocks"] for worker in overlap["workers"]]
        return len(held) == len(self._workers) and min(held) == MAX_TOKENS // BLOCK_SIZE

    async def _until(self, holds: Any) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not await holds():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Dynamo's router was not ready within {READY_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.2)

    def _worker(self, folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.routing.dynamo_worker", str(folder)]
        with self._log.open("a") as log:
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def _await_line(self, worker: subprocess.Popen[str], wanted: str) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith(wanted):
                return
        raise RuntimeError(f"a Dynamo worker ended before it was up: {self._log.read_text()[-1000:]}")
