"""`vllm serve` as a user starts it, with its two flags for KV events."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from engine.vllm.server.ranks import HEADER
from runtime.processes.ports import free_port
from tests.vllm.environment import PATIENCE_S, START_S, smollm2, variables

MODEL = "smollm2"
BLOCK = 32  # what vLLM's attention on a CPU can do is multiples of 32
NUM_BLOCKS = 24  # few, so that prompts evict each other
MAX_MODEL_LEN = 512


class VllmServer:
    """`max_model_len`, `num_blocks`: of each of its engines. `flags`: more of them, names and values in turn.
    `model`: another one than smollm2, under its name."""

    def __init__(
        self,
        python: Path,
        log_file: Path,
        max_model_len: int = MAX_MODEL_LEN,
        num_blocks: int = NUM_BLOCKS,
        flags: Sequence[str] = (),
        ranks: int = 1,
        model: Path | None = None,
    ) -> None:
        self._max_model_len, self._num_blocks, self._flags, self._ranks = max_model_len, num_blocks, flags, ranks
        ports = [free_port("0.0.0.0", in_a_row=ranks) for _ in range(4)]
        self.port, self._events_port, self._replay_port, self._side_port = ports
        self._python, self._model = python, model or smollm2()
        self._log_file = log_file
        self._process: asyncio.subprocess.Process | None = None
        self.client = httpx.AsyncClient(base_url=self.address, timeout=PATIENCE_S)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._events_port}"

    @property
    def replay_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._replay_port}"

    async def start(self) -> None:
        """Returns when it serves."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self._events_port}",
            "replay_endpoint": f"tcp://*:{self._replay_port}",
        }
        options = {
            "--model": str(self._model),
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--dtype": "float32",
            "--max-model-len": str(self._max_model_len),
            "--block-size": str(BLOCK),
            "--num-gpu-blocks-override": str(self._num_blocks),
            "--kv-events-config": json.dumps(events),
            "--data-parallel-size": str(self._ranks),
        }
        arguments = [word for option in options.items() for word in option] + [*self._flags]
        with self._log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *arguments),
                stdout=log,
                stderr=log,
                env=variables() | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_port)},
                start_new_session=True,
            )
        async with asyncio.timeout(START_S):
            while not await self._serves():
                if self._process.returncode is not None:
                    raise AssertionError(self._log_file.read_text()[-4000:])
                await asyncio.sleep(0.25)

    async def complete(self, token_ids: list[int], max_tokens: int = 1, rank: int | None = None) -> str:
        """The greedy answer to a prompt."""
        headers = {} if rank is None else {HEADER: str(rank)}
        body = {"model": MODEL, "prompt": token_ids, "max_tokens": max_tokens, "temperature": 0}
        answer = await self.client.post("/v1/completions", json=body, headers=headers)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    async def forget(self) -> None:
        """Empties its prefix cache; it says so with its next step."""
        (await self.client.post("/reset_prefix_cache")).raise_for_status()

    def kill(self) -> None:
        """Ends all of its processes at once."""
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, number)

    def processes(self) -> list[psutil.Process]:
        assert self._process is not None, "start() came before"
        return psutil.Process(self._process.pid).children(recursive=True)

    async def close(self) -> None:
        await self.client.aclose()
        await self.stop()

    async def stop(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), 60)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    async def _serves(self) -> bool:
        try:
            return (await self.client.get("/health")).status_code == 200
        except httpx.TransportError:
            return False


def prompt(num_blocks: int, start: int = 1000) -> list[int]:
    """Token ids that fill whole blocks."""
    return list(range(start, start + num_blocks * BLOCK))
