"""Dynamo's frontend and its mock workers, as processes beside our service, for `--with-dynamo`.

Because discovery is a folder and events go over ZeroMQ, neither etcd nor NATS is needed. Engine time is zero, and the
workers have the same blocks, batches and roles as ours. At its level `error` the frontend writes one line per request,
as our router does.
"""

import asyncio
import contextlib
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from baton_proto.planner import DECODE, PREFILL, ROLES
from benchmarks.frontend.dynamo_model import write_model
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import ServingConfig
from runtime.config.step_times import StepTimes
from runtime.processes.launch import launch_command
from runtime.processes.ports import free_port

HOST = "127.0.0.1"
TOKENIZERS = ("fastokens", "default")
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 20


class PeerFailedError(Exception):
    def __init__(self, reason: str, log: str) -> None:
        super().__init__(f"Dynamo's frontend does not serve: {reason}\n{log}")


class DynamoService:
    """Serves `files` with as many workers as `config` names. `tokenizer` is one of TOKENIZERS."""

    def __init__(self, python: Path, files: ModelFiles, config: ServingConfig, tokenizer: str) -> None:
        self._python = python
        self._files = files
        self._config = config
        self._tokenizer = tokenizer
        self._port = 0
        self._processes: list[asyncio.subprocess.Process] = []
        self._exit = contextlib.ExitStack()
        self._folder = Path()

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def commands(self) -> list[str]:
        """The command lines of the processes, as one would type them."""
        return [f"python -m {' '.join(arguments)}" for arguments in self._commands()]

    @property
    def pid(self) -> int:
        """The process id of the frontend."""
        return self._processes[0].pid

    async def __aenter__(self) -> Self:
        """Returns when all workers are known and the model is served. Raises PeerFailedError."""
        self._folder = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-")))
        try:
            await asyncio.to_thread(write_model, self._files.folder, self._folder / "model", self._tokenizer)
            self._port = free_port(HOST)
            for number, arguments in enumerate(self._commands()):
                self._processes.append(await self._start(arguments, self._folder / f"{number}.log"))
            await self._ready()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def _commands(self) -> Iterator[list[str]]:
        """The frontend's command first, then one for each role's process of workers."""
        frontend = {
            "--http-host": HOST,
            "--http-port": self._port,
            "--router-mode": "kv",
            "--tokenizer": self._tokenizer,
        }
        yield ["dynamo.frontend", *_flags(frontend), "--no-tokenizer-fallback"]
        workers, engine, mock = self._config.workers, self._config.engine, self._config.mock
        roles = [(role, workers.count(role)) for role in ROLES] if workers.count(PREFILL) else []
        for role, count in roles or [("agg", workers.count(DECODE))]:
            flags = {
                "--model-path": self._folder / "model",
                "--model-name": self._files.name,
                "--disaggregation-mode": role,
                "--num-workers": count,
                "--block-size": engine.block_size,
                "--num-gpu-blocks-override": mock.kv_blocks,
                "--max-num-batched-tokens": engine.max_batch_tokens,
                "--max-num-seqs": engine.max_running,
                "--speedup-ratio": StepTimes().decode_floor_ms / self._config.step_times.decode_floor_ms,
                "--kv-bytes-per-token": 8,
                "--kv-transfer-bandwidth": 0,
            }
            yield ["dynamo.mocker", *_flags(flags)]

    async def _start(self, arguments: list[str], log: Path) -> asyncio.subprocess.Process:
        settings = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self._folder / "discovery"),
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "error",
        }
        with log.open("wb") as file:
            return await asyncio.create_subprocess_exec(
                *launch_command(str(self._python)),
                "-E",  # the peer must not see our PYTHONPATH
                "-P",
                "-m",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | settings,
            )

    async def _ready(self) -> None:
        expected = self._config.workers.total
        until_s = time.monotonic() + START_TIMEOUT_S
        while await asyncio.to_thread(self._num_workers) < expected or not await asyncio.to_thread(self._has_model):
            ended = [process.returncode for process in self._processes if process.returncode is not None]
            if ended or time.monotonic() > until_s:
                raise PeerFailedError(f"ended with {ended}" if ended else "not ready in time", self._log_tail())
            await asyncio.sleep(0.2)

    def _num_workers(self) -> int:
        instances = self._get("/health").get("instances", [])
        return sum(instance["endpoint"] == "generate" for instance in instances)

    def _has_model(self) -> bool:
        return bool(self._get("/v1/models").get("data"))

    def _get(self, path: str) -> dict[str, Any]:
        """The answer; empty while nobody answers, or something else does."""
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=5) as answer:
                return msgspec.json.decode(answer.read(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            return {}

    def _log_tail(self) -> str:
        lines = [line for log in sorted(self._folder.glob("*.log")) for line in log.read_text().splitlines()]
        return "\n".join(lines[-LOG_TAIL_LINES:])

    async def _stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self._processes:
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        self._exit.close()


def _flags(values: Mapping[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (name, str(value))]
