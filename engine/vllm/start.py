"""Starts vLLM, which the interpreter of this process has, and ends it: its processes, sockets and guard."""

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.vllm.arguments import check_vllm, shares_kv, vllm_arguments
from engine.vllm.events.stream import VllmStream
from engine.vllm.guard import start_guard
from engine.vllm.kv.cache_memory import VllmSlab
from engine.vllm.kv.link import WorkerEnd
from engine.vllm.private_names import SHARING, check_names
from engine.vllm.versions import check_version
from runtime.checkpoint.model_files import ModelFiles
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError, ModelError

SOCKET_PATH_CHARS = 90  # a socket's path has 107 at most
CONNECT_TIMEOUT_S = 30.0
SHUTDOWN_TIMEOUT_S = 5.0


class StartedVllm:
    """`llm`: an AsyncLLM that serves. `link`, `slab` and `form`: where workers share KV, the way to the process that
    computes, its KV cache, and what the bytes of that depend on."""

    def __init__(self, config: ServingConfig, files: ModelFiles) -> None:
        """Raises ConfigError, ModelError or UnavailableError."""
        check_vllm(config)
        try:
            import vllm
        except ImportError as error:
            problem = f"has no vLLM ({error}): name the interpreter of an environment that has it (make vllm-env)"
            raise ConfigError("workers.python", problem) from error
        check_version(vllm.__version__)
        self._guard = start_guard()
        self._sockets = _folder_for_sockets()
        self.link = WorkerEnd(self._sockets / "kv") if shares_kv(config) else None
        self.slab: VllmSlab | None = None
        self.form = ""
        try:
            self.llm = self._start(config, files)
            if self.link is not None:
                memory, fd = self.link.accept(CONNECT_TIMEOUT_S)
                try:
                    self.slab, self.form = VllmSlab(memory, fd), memory.form
                finally:
                    os.close(fd)
        except BaseException:
            shutil.rmtree(self._sockets, ignore_errors=True)
            raise  # the guard ends what is left when this process does

    def events(self) -> VllmStream:
        """What vLLM tells of its prefix cache, not yet open."""
        return VllmStream(self._address("events"), self._address("replay"), CONNECT_TIMEOUT_S)

    def close(self) -> None:
        self.llm.shutdown(SHUTDOWN_TIMEOUT_S)
        self._guard.kill()
        self._guard.wait()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _address(self, socket: str) -> str:
        return f"ipc://{self._sockets / socket}"

    def _start(self, config: ServingConfig, files: ModelFiles) -> Any:
        """Ends the AsyncLLM's output handler before it begins, because we take the outputs. vLLM's modules read these
        variables as they are imported."""
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has threads
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if config.engine.threads:  # else vLLM binds each worker's threads to all cores
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        import vllm

        off = check_names(vllm.__version__, [SHARING] if shares_kv(config) else [])
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments(config, files, off)))
        except (ValueError, TypeError, RuntimeError) as error:  # of its checks, or its processes, which have logged why
            raise ModelError(files.name, f"vLLM cannot serve it: {error}") from error
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        return llm

    def _arguments(self, config: ServingConfig, files: ModelFiles, off: Sequence[str]) -> dict[str, Any]:
        from vllm.config import KVEventsConfig, KVTransferConfig, StructuredOutputsConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform

        told = {"enable_kv_cache_events": True, "publisher": "zmq"}
        told |= {"endpoint": self._address("events"), "replay_endpoint": self._address("replay")}
        known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}.difference(off)
        arguments = vllm_arguments(config, files.folder, told, known, on_cpu=current_platform.is_cpu())
        if self.link is not None:
            arguments["kv_transfer_config"] = KVTransferConfig(
                kv_connector="BatonConnector",
                kv_connector_module_path="engine.vllm.kv.connector",
                kv_role="kv_both",
                kv_connector_extra_config={"socket": str(self._sockets / "kv")},
                kv_load_failure_policy="fail",
            )
        kinds = {"kv_events_config": KVEventsConfig, "structured_outputs_config": StructuredOutputsConfig}
        for name, kind in kinds.items():
            if isinstance(arguments.get(name), dict):
                arguments[name] = kind(**arguments[name])
        return arguments


def _folder_for_sockets() -> Path:
    """Nobody else may enter it: the events have prompts in them."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    if len(str(folder)) > SOCKET_PATH_CHARS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="vllm-", dir="/tmp"))
    return folder
