"""Builds a worker's engine from vLLM, which the interpreter of this process has: `workers.engine: vllm`."""

import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import structlog

from engine.core.engine import Engine, StepOutput
from engine.vllm.arguments import check_keys, shares_kv, vllm_arguments
from engine.vllm.cache import VllmCache
from engine.vllm.engine import VllmEngine
from engine.vllm.events.stream import VllmStream
from engine.vllm.guard import start_guard
from engine.vllm.kv.cache_memory import VllmSlab
from engine.vllm.kv.engine import SharingEngine
from engine.vllm.kv.link import WorkerEnd
from engine.vllm.loop import VllmLoop
from engine.vllm.memory import VllmMemory
from engine.vllm.sampling import refusal, repeats
from engine.vllm.versions import check_version
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from runtime.checkpoint.fingerprint import fingerprint
from runtime.checkpoint.model_files import ModelFiles, weight_files
from runtime.checkpoint.served_model import served_model
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError, ModelError, UnavailableError
from runtime.grammar.compiler import GrammarCompiler
from worker.engines.own import EngineAssembly, config_hash

SOCKET_PATH_CHARS = 90  # a socket's path has 107 at most
CONNECT_TIMEOUT_S = 30.0
SHUTDOWN_TIMEOUT_S = 5.0

log = structlog.get_logger()


def build_vllm(config: ServingConfig) -> EngineAssembly:
    """Raises ConfigError or ModelError. Event loop only."""
    check_keys(config)
    try:
        import vllm
    except ImportError as error:
        problem = f"has no vLLM ({error}): name the interpreter of an environment that has it (make vllm-env)"
        raise ConfigError("workers.python", problem) from error
    check_version(vllm.__version__)
    files = served_model(config)
    guard = start_guard()
    sockets = _folder_for_sockets()
    events, replay = f"ipc://{sockets}/events", f"ipc://{sockets}/replay"
    link = WorkerEnd(sockets / "kv") if shares_kv(config) else None
    try:
        llm = _started(config, files, events, replay, sockets / "kv")
        slab, form = (None, "") if link is None else _shared(link)
    except BaseException:
        shutil.rmtree(sockets, ignore_errors=True)
        raise  # the guard ends what is left when this process does

    def close() -> None:
        llm.shutdown(SHUTDOWN_TIMEOUT_S)
        guard.kill()
        guard.wait()
        shutil.rmtree(sockets, ignore_errors=True)

    make_stream = functools.partial(VllmStream, events, replay, CONNECT_TIMEOUT_S)
    return _assembled(config, files, llm, make_stream, close, link, slab, form)


def _shared(link: WorkerEnd) -> tuple[VllmSlab, str]:
    """vLLM's KV cache, and its form."""
    memory, fd = link.accept(CONNECT_TIMEOUT_S)
    try:
        return VllmSlab(memory, fd), memory.form
    finally:
        os.close(fd)


def _folder_for_sockets() -> Path:
    """Nobody else may enter it: the events have prompts in them."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    if len(str(folder)) > SOCKET_PATH_CHARS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="vllm-", dir="/tmp"))
    return folder


def _started(config: ServingConfig, files: ModelFiles, events: str, replay: str, kv_socket: Path) -> Any:
    """An AsyncLLM that serves. Its output handler is ended before it begins, because we take the outputs."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # this process has threads
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if config.engine.threads:  # else vLLM binds each worker's threads to all cores
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm.config import KVEventsConfig, KVTransferConfig, StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    arguments = vllm_arguments(config, files.folder, told, known, on_cpu=current_platform.is_cpu())
    if shares_kv(config):
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector="BatonConnector",
            kv_connector_module_path="engine.vllm.kv.connector",
            kv_role="kv_both",
            kv_connector_extra_config={"socket": str(kv_socket)},
            kv_load_failure_policy="fail",
        )
    for name, kind in (("kv_events_config", KVEventsConfig), ("structured_outputs_config", StructuredOutputsConfig)):
        if isinstance(arguments.get(name), dict):
            arguments[name] = kind(**arguments[name])
    try:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    except (ValueError, TypeError, RuntimeError) as error:  # of its checks, or of its processes, which have logged why
        raise ModelError(files.name, f"vLLM cannot serve it: {error}") from error
    if llm.output_handler is not None:
        llm.output_handler.cancel()
    return llm


def _assembled(
    config: ServingConfig,
    files: ModelFiles,
    llm: Any,
    make_stream: Callable[[], VllmStream],
    close: Callable[[], None],
    link: WorkerEnd | None,
    slab: VllmSlab | None,
    form: str,
) -> EngineAssembly:
    """`link`, `slab` and `form` where prompts and answers may run on different workers."""
    from vllm.platforms import current_platform

    vllm_config = llm.vllm_config
    cache_config, model = vllm_config.cache_config, files.config
    if cache_config.block_size != config.engine.block_size:
        problem = f"vLLM takes {cache_config.block_size} for this model: set the same"
        raise ConfigError("engine.block_size", problem)
    num_blocks = cache_config.num_gpu_blocks - 1  # one holds nothing
    layout = SlabLayout(
        model.num_layers,
        num_blocks,
        model.num_kv_heads,
        cache_config.block_size,
        model.head_dim,
        str(vllm_config.model_config.dtype).removeprefix("torch."),
    )
    cache = VllmCache(layout.block_size, num_blocks)
    if link is None:
        engine = VllmEngine(llm, cache, files.eos_token_ids)
    else:
        engine = SharingEngine(llm, cache, files.eos_token_ids, link)
    memory = VllmMemory(llm, cache, weights_fingerprint(files), on_cpu=current_platform.is_cpu())

    def make_loop(_: Engine, on_step: Callable[[StepOutput], None]) -> VllmLoop:
        memory.loop = VllmLoop(engine, make_stream(), on_step)
        return memory.loop

    log.info("vLLM built", model=files.name, blocks=num_blocks, block_size=layout.block_size)
    return EngineAssembly(
        engine=cast(Engine, engine),  # it has what worker/ and the roles ask of one
        slab=cast(Slab | None, slab),
        layout=layout if slab is None else slab.layout,
        ranks=config.engine.tensor_parallel,
        make_sender=no_sender if slab is None else functools.partial(Sender, cast(Slab, slab)),
        other_slabs=list,
        memory=memory,
        model=config.served_model_name or files.name,
        config_hash=config_hash(files),
        max_model_len=min(vllm_config.model_config.max_model_len, num_blocks * layout.block_size),
        close=close,
        grammars=GrammarCompiler(files.folder, model.vocab_size, files.eos_token_ids),
        loop=make_loop,
        engine_masks=True,
        refuses=refusal,
        repeats=repeats,
        heeds_due=False,
        kind="vllm",
        kv_form=form,
    )


def weights_fingerprint(files: ModelFiles) -> str:
    """As our own engine names these weights, so that both may serve them together."""
    from engine.model.checkpoint import Checkpoint  # here: it needs torch

    try:
        return Checkpoint(files.folder).fingerprint()
    except ModelError:  # of tensors that our own engine cannot read
        return "-".join(map(fingerprint, weight_files(files.folder)))


def no_sender(*_: object) -> Any:
    raise UnavailableError("a worker with vLLM sends no KV in a service that began with workers.prefill: 0")
