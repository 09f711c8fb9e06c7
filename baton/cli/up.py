"""`baton up`: a service in the foreground, until a signal drains it."""

import asyncio
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from baton.cli.terminal.exit_codes import ExitCode, errors_reported
from baton.cli.terminal.options import RayAddressOption
from baton.cli.terminal.service_news import print_news
from baton.service.local_launcher import LocalLauncher
from baton.service.service_run import ServiceRun
from baton.shadowing import refuse_shadowed
from kvtransfer.transports.table import check_choice, choices
from runtime.checkpoint.served_model import served_model
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig, load_config, with_absolute_paths
from runtime.errors import ConfigError
from runtime.telemetry.logging import configure_logging

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


PortOption = Annotated[int | None, typer.Option(min=0, max=65535, metavar="PORT", help="0 picks a free one.")]
CountOption = Annotated[int | None, typer.Option(min=0, metavar="N", help="How many workers of this role.")]


def up(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Such as serving.yaml; flags go before it.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME_OR_PATH", help="smollm2, a Hugging Face folder, a .gguf file or mock.")
    ] = None,
    prefill: CountOption = None,
    decode: CountOption = None,
    http_port: PortOption = None,
    grpc_port: PortOption = None,
    nats_url: Annotated[str | None, typer.Option(metavar="URL", help="Use this NATS instead of starting one.")] = None,
    planner: Annotated[
        bool | None, typer.Option("--planner/--no-planner", help="Start and end workers as the load asks for it.")
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(metavar=f"[{'|'.join(choices())}]", autocompletion=choices, help="How KV blocks travel."),
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="One log file per process, instead of all logs on stderr.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="On a Ray cluster; return when the service is up.")] = False,
    address: RayAddressOption = "auto",
    nodes: Annotated[
        int, typer.Option("--nodes", min=1, metavar="N", help="With --ray: start when the cluster has so many nodes.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print what happens as one JSON object per line.")] = False,
) -> None:
    """Start a service on this machine and stay in the foreground.

    Ctrl-C or SIGTERM drains: requests in flight end, new ones are refused. A second one ends everything at once.

    With --ray the processes run on the Ray cluster at --address and stay there; `baton down` drains and ends them.
    """
    refuse_shadowed()  # here, because the processes of the service would show tracebacks
    flags = {
        "model": model,
        "workers": {"prefill": prefill, "decode": decode},
        "router": {"http_port": http_port, "grpc_port": grpc_port},
        "nats": {"url": nats_url},
        "planner": {"enabled": planner},
        "transfer": {"transport": transport},
    }
    with errors_reported():
        serving = with_overrides(load_config(config), _given(flags))
        check_choice(serving.transfer.transport)
        configure_logging(serving.logging, "baton")
        served_model(serving, progress=True)  # converts the model, once, with its progress on the terminal
        if ray:
            code = _on_ray(serving, log_dir, address, nodes, as_json)
        else:
            code = asyncio.run(_in_foreground(serving, log_dir, as_json))
    raise typer.Exit(code)


async def _in_foreground(config: ServingConfig, log_dir: Path | None, as_json: bool) -> ExitCode:
    def tell(line: str, *, event: str, **fields: Any) -> None:
        print_news(as_json, f"{line}; once more to end it now" if event == "draining" else line, event=event, **fields)

    run = ServiceRun(config, LocalLauncher(config, log_dir), tell)
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(
            number, lambda: (run.hurry if run.stop.is_set() else run.stop).set()
        )
    return ExitCode.OK if await run.run() else ExitCode.FAILED


def _on_ray(config: ServingConfig, log_dir: Path | None, address: str, nodes: int, as_json: bool) -> ExitCode:
    if log_dir is not None:
        raise ConfigError("--log-dir", "is not for --ray: logs stay on their nodes, and `baton logs` shows them")
    from baton.service.on_ray.cluster import connected, wait_for_nodes

    tell = partial(print_news, as_json)
    with connected(address, config.namespace):
        from baton.service.on_ray.commands import bring_up

        wait_for_nodes(nodes, tell)
        bring_up(with_absolute_paths(config), tell)
    return ExitCode.OK


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags without those that were left out."""
    nested = {key: _given(value) if isinstance(value, dict) else value for key, value in flags.items()}
    return {key: value for key, value in nested.items() if value is not None and value != {}}
