"""`baton up`: a service in the foreground, until a signal drains it."""

import asyncio
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from baton.cli.preflight import check_start
from baton.cli.terminal.exit_codes import ExitCode, errors_reported
from baton.cli.terminal.options import RayAddressOption
from baton.cli.terminal.service_news import print_news
from baton.service.launcher import uses_gpus
from baton.service.local_launcher import LocalLauncher, this_machine
from baton.service.machine_defaults import described, suited
from baton.service.service_run import ServiceRun, Tell
from baton.shadowing import refuse_shadowed
from kvtransfer.transports.table import choices
from runtime.checkpoint.model_files import ModelFiles, pinned
from runtime.checkpoint.served_model import is_mock, served_model
from runtime.config.overrides import merged, with_overrides
from runtime.config.paths import with_absolute_paths
from runtime.config.serving import ServingConfig, load_config
from runtime.config.types import Workers
from runtime.config.workers import WorkerEngine
from runtime.config.yaml_file import read_yaml
from runtime.errors import ConfigError
from runtime.telemetry.logging import configure_logging
from worker.engines.table import NAMES

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


MODEL, WORKERS, REACH, RUN, RAY = "Model", "Workers", "Reach", "This run", "Ray"  # groups of the help


def _option(group: str, metavar: str | None, words: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=words, rich_help_panel=group, **settings)


def worker_counts(text: str) -> int | dict[str, int | None]:
    """What `workers.prefill` and `workers.decode` hold, of a flag. Raises typer.BadParameter."""
    try:
        if "=" not in text:
            return msgspec.convert(text, Workers, strict=False)
        parts = [part.split("=") for part in text.split(",")]
        given = msgspec.convert(dict(parts), dict[WorkerEngine, Workers], strict=False)
        if len(given) < len(parts) or not given.keys() <= set(NAMES):
            raise ValueError("an engine is given twice, or there is none of this name")
        return dict.fromkeys(NAMES) | given  # None: what the file gives goes
    except ValueError as error:
        names = " or ".join(NAMES)
        raise typer.BadParameter(f"{text!r} is neither a count nor counts of {names} such as baton=1,vllm=2") from error


PortOption = Annotated[int | None, _option(REACH, "PORT", "0 picks a free one.", min=0, max=65535)]
CountOption = Annotated[
    Any | None,
    _option(WORKERS, "N|ENGINE=N,...", "Workers of this role, such as 2 or baton=1,vllm=2.", parser=worker_counts),
]


def up(
    config: Annotated[Path | None, _option(RUN, "FILE", "Such as serving.yaml; flags go before it.")] = None,
    model: Annotated[
        str | None,
        _option(MODEL, "NAME_OR_PATH", "A model on the Hugging Face Hub, a folder, a .gguf file, smollm2 or mock."),
    ] = None,
    served_model_name: Annotated[
        str | None, _option(MODEL, "NAME", "What clients ask for. [default: the model's name]")
    ] = None,
    generation_config: Annotated[
        str | None, _option(MODEL, "auto|none|FOLDER", "Whose generation_config.json says how to sample by default.")
    ] = None,
    tool_parser: Annotated[
        str | None, _option(MODEL, "auto|none|NAME", "How the model writes tool calls, such as hermes.")
    ] = None,
    reasoning_parser: Annotated[
        str | None, _option(MODEL, "auto|none|NAME", "How the model marks its reasoning: think or mistral.")
    ] = None,
    max_model_len: Annotated[int | None, _option(MODEL, "TOKENS", "Longest prompt and answer together.")] = None,
    prefill: CountOption = None,
    decode: CountOption = None,
    kv_memory: Annotated[str | None, _option(WORKERS, "SIZE", "For KV blocks, on each GPU: 8GiB, or auto.")] = None,
    block_size: Annotated[int | None, _option(WORKERS, "TOKENS", "Per KV block: 16, 32, 64 or 128.")] = None,
    tensor_parallel: Annotated[int | None, _option(WORKERS, "N", "GPUs of one worker: 1, 2, 4 or 8.")] = None,
    transport: Annotated[
        str | None, _option(WORKERS, f"[{'|'.join(choices())}]", "How KV blocks travel.", autocompletion=choices)
    ] = None,
    planner: Annotated[
        bool | None,
        _option(WORKERS, None, "Start and end workers as the load asks for it.", "--planner/--no-planner"),
    ] = None,
    host: Annotated[
        str | None, _option(REACH, "ADDRESS", "What the router listens on; 0.0.0.0: from everywhere, with keys.")
    ] = None,
    http_port: PortOption = None,
    grpc_port: PortOption = None,
    api_key_file: Annotated[Path | None, _option(REACH, "FILE", "Keys that clients must show, one per line.")] = None,
    insecure: Annotated[
        bool | None, _option(REACH, None, "Whoever reaches the router may ask, without a key.", "--insecure")
    ] = None,
    nats_url: Annotated[str | None, _option(REACH, "URL", "Use this NATS instead of starting one.")] = None,
    log_dir: Annotated[
        Path | None, _option(RUN, "DIR", "One log file per process, which stays, and no logs on stderr.")
    ] = None,
    as_json: Annotated[bool, _option(RUN, None, "Print what happens as one JSON object per line.", "--json")] = False,
    ray: Annotated[bool, _option(RAY, None, "On a Ray cluster; return when the service is up.", "--ray")] = False,
    address: RayAddressOption = "auto",
    nodes: Annotated[int, _option(RAY, "N", "Start when the cluster has so many nodes.", min=1)] = 1,
) -> None:
    """Start a service on this machine and stay in the foreground.

    Ctrl-C or SIGTERM drains: requests in flight end, new ones are refused. A second one ends everything at once.

    With --ray the processes run on the Ray cluster at --address and stay there; `baton down` drains and ends them.
    """
    refuse_shadowed()  # here, because the processes of the service would show tracebacks
    flags = _given(
        {
            "model": model,
            "served_model_name": served_model_name,
            "workers": {"prefill": prefill, "decode": decode},
            "engine": {
                "max_model_len": max_model_len,
                "kv_memory": kv_memory,
                "block_size": block_size,
                "tensor_parallel": tensor_parallel,
            },
            "router": {
                "host": host,
                "http_port": http_port,
                "grpc_port": grpc_port,
                "generation_config": generation_config,
                "tool_parser": tool_parser,
                "reasoning_parser": reasoning_parser,
            },
            "security": {"api_key_file": None if api_key_file is None else str(api_key_file), "insecure": insecure},
            "nats": {"url": nats_url},
            "planner": {"enabled": planner},
            "transfer": {"transport": transport},
        }
    )
    with errors_reported():
        serving = with_overrides(load_config(config), flags, "flags")
        configure_logging(serving.logging, "baton")
        files = served_model(serving, progress=True)  # fetches or converts it, once, with its progress on the terminal
        serving = msgspec.structs.replace(serving, model=pinned(serving.model, files))
        given = flags if config is None else merged(read_yaml(config), flags)
        tell = partial(print_news, as_json)
        if ray:
            check_start(serving, files, None)
            code = _on_ray(serving, given, files, log_dir, address, nodes, tell)
        else:
            gpu = uses_gpus(serving, this_machine())
            serving = suited(serving, given, files, gpu=gpu)
            check_start(serving, files, this_machine())
            _tell_choice(serving, files, gpu, tell)
            code = asyncio.run(_in_foreground(serving, log_dir, tell))
    raise typer.Exit(code)


def _tell_choice(config: ServingConfig, files: ModelFiles, gpu: bool, tell: Tell) -> None:
    """What the workers' engines take, chosen or configured."""
    if is_mock(config):
        return
    values = described(config, files, gpu=gpu)
    shown = ", ".join(f"{key} {value}" for key, value in values.items())
    tell(f"{config.model}: {shown}", event="engine", model=config.model, **values)


async def _in_foreground(config: ServingConfig, log_dir: Path | None, tell: Tell) -> ExitCode:
    def tell_more(line: str, *, event: str, **fields: Any) -> None:
        tell(f"{line}; once more to end it now" if event == "draining" else line, event=event, **fields)

    run = ServiceRun(config, LocalLauncher(config, log_dir), tell_more)
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: (run.hurry if run.stop.is_set() else run.stop).set()
        )
    return ExitCode.OK if await run.run() else ExitCode.FAILED


def _on_ray(
    config: ServingConfig,
    given: dict[str, Any],
    files: ModelFiles,
    log_dir: Path | None,
    address: str,
    nodes: int,
    tell: Tell,
) -> ExitCode:
    if log_dir is not None:
        raise ConfigError("--log-dir", "is not for --ray: logs stay on their nodes, and `baton logs` shows them")
    from baton.service.on_ray.cluster import connected, wait_for_nodes

    with connected(address, config.namespace):
        from baton.service.on_ray.commands import bring_up
        from baton.service.on_ray.launcher import RayLauncher

        wait_for_nodes(nodes, tell)
        gpu = uses_gpus(config, RayLauncher(config).machines)
        config = suited(config, given, files, gpu=gpu)
        _tell_choice(config, files, gpu, tell)
        bring_up(with_absolute_paths(config), tell)
    return ExitCode.OK


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags without those that were left out."""
    nested = {key: _given(value) if isinstance(value, dict) else value for key, value in flags.items()}
    return {key: value for key, value in nested.items() if value is not None and value != {}}
