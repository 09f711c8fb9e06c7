"""`baton up`: a service in the foreground, until a signal drains it."""

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any

import msgspec
import typer

from baton.cli.preflight import check_models, check_start
from baton.cli.terminal.exit_codes import ExitCode, errors_reported
from baton.cli.terminal.options import RayAddressOption
from baton.cli.terminal.service_news import print_news
from baton.service.launcher import Machines
from baton.service.local.local_launcher import LocalLauncher, this_machine
from baton.service.service_run import ServiceRun
from baton.service.systemd import Systemd
from baton.service.telling import Tell
from baton.service.wanted.configuration import Wanted, together, wanted_models
from baton.shadowing import refuse_shadowed
from runtime.config.overrides import merged, nested, with_overrides
from runtime.config.paths import absolute, with_absolute_paths
from runtime.config.serving import ServingConfig, load_config
from runtime.config.types import Workers
from runtime.config.workers import WorkerEngine
from runtime.config.yaml_file import read_yaml
from runtime.end_task import end_tasks
from runtime.errors import ConfigError
from runtime.telemetry.logging import configure_logging
from worker.engines.table import NAMES

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TERMINAL = "/dev/tty"
GGUF = ".gguf"
SETTINGS, RUN, RAY = "Settings", "This run", "Ray"  # groups of the help


def _option(group: str, metavar: str | None, words: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=words, rich_help_panel=group, **settings)


def worker_counts(text: str) -> int | dict[str, int | None]:
    """Parses a flag into the value of `workers.prefill` or `workers.decode`. Raises typer.BadParameter."""
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


ConfigOption = Annotated[Path | None, _option(SETTINGS, "FILE", "serving.yaml; the options below go before it.")]
NamedOption = Annotated[
    list[str] | None,
    _option(
        SETTINGS,
        "NAME_OR_PATH",
        "A model on the Hugging Face Hub, a folder, a .gguf file, smollm2 or mock. Several times: several models, each "
        "with the workers that --prefill and --decode say.",
        "--model",
    ),
]
CountOption = Annotated[
    Any | None,
    _option(SETTINGS, "N|ENGINE=N,...", "Workers of this role, such as 2 or baton=1,vllm=2.", parser=worker_counts),
]
PlannerOption = Annotated[
    bool | None, _option(SETTINGS, None, "Start and end workers as the load asks for it.", "--planner/--no-planner")
]
NamespaceOption = Annotated[
    str | None,
    _option(SETTINGS, "NAME", "Of the service at its NATS and on its Ray cluster, which may have several."),
]
PortOption = Annotated[int | None, _option(SETTINGS, "PORT", "Of the HTTP API. 0 picks a free one.", min=0, max=65535)]
SetOption = Annotated[
    list[str] | None,
    _option(SETTINGS, "KEY=VALUE", "Any other key, such as engine.block_size=32: `baton config` has all.", "--set"),
]
LogDirOption = Annotated[
    Path | None,
    _option(RUN, "DIR", "One log file per process, which stays (the last 64 to 128 MiB), and no logs on stderr."),
]
JsonOption = Annotated[bool, _option(RUN, None, "Print what happens as one JSON object per line.", "--json")]
RayOption = Annotated[bool, _option(RAY, None, "On a Ray cluster; return when the service is up.", "--ray")]
NodesOption = Annotated[int, _option(RAY, "N", "Start when the cluster has so many nodes.", min=1)]


def up(
    config: ConfigOption = None,
    model: NamedOption = None,
    prefill: CountOption = None,
    decode: CountOption = None,
    planner: PlannerOption = None,
    http_port: PortOption = None,
    namespace: NamespaceOption = None,
    settings: SetOption = None,
    log_dir: LogDirOption = None,
    as_json: JsonOption = False,
    ray: RayOption = False,
    address: RayAddressOption = "auto",
    nodes: NodesOption = 1,
) -> None:
    """Start a service on this machine and stay in the foreground.

    Ctrl-C or SIGTERM drains: requests in flight end, new ones are refused. A second one ends everything at once. SIGHUP
    drains where there is a terminal, which has gone then; elsewhere it opens the logs anew and reads logging.level
    again.

    With --ray the processes run on the Ray cluster at --address and stay there; `baton down` drains and ends them.
    """
    refuse_shadowed()  # here, because the processes of the service would show tracebacks
    flags = {
        **_models(model or []),
        "namespace": namespace,
        "workers": {"prefill": prefill, "decode": decode},
        "router": {"http_port": http_port},
        "planner": {"enabled": planner},
    }
    with errors_reported():
        flags = functools.reduce(merged, map(nested, settings or ()), _given(flags))
        wished, services = _wanted(config, flags)
        tell = partial(print_news, as_json)
        if ray:
            if log_dir is not None:
                raise ConfigError("--log-dir", "is not for --ray: logs stay on their nodes; `baton logs` shows them")
            _on_ray(wished, services, flags, address, nodes, tell)
            return
        machine = this_machine()
        services = [service.suited(machine) for service in services]
        check_models(services, machine)
        for service in services:
            _tell_choice(service, machine, tell)
        reread = partial(_configuration, config, flags)
        code = asyncio.run(_in_foreground(together(wished, services), log_dir, tell, reread, flags))
    raise typer.Exit(code)


def _models(given: Sequence[str]) -> dict[str, Any]:
    """What goes before the models of a file. Of several each is asked for by the end of its name or path."""
    if len(given) < 2:
        return {"model": given[0], "models": []} if given else {}
    named = [{"name": PurePath(model).name.removesuffix(GGUF), "model": model} for model in given]
    return {"model": ServingConfig().model, "models": named}


def _wanted(path: Path | None, flags: dict[str, Any]) -> tuple[ServingConfig, list[Wanted]]:
    """The configuration, and what it takes for each model. Raises ConfigError, ModelError."""
    config = _configuration(path, flags)
    configure_logging(config.logging, "baton")
    given = flags if path is None else merged(read_yaml(path), flags)
    return config, wanted_models(config, given, progress=True)


def _tell_choice(service: Wanted, machines: Machines, tell: Tell) -> None:
    """Tells what the workers' engines take, chosen or configured."""
    if values := service.chosen(machines):
        model = service.config.model
        shown = ", ".join(f"{key} {value}" for key, value in values.items())
        tell(f"{model}: {shown}", event="engine", model=model, **values)


def _configuration(path: Path | None, flags: dict[str, Any]) -> ServingConfig:
    """Raises ConfigError."""
    return with_overrides(load_config(path), flags, "flags")


async def _in_foreground(
    config: ServingConfig,
    log_dir: Path | None,
    tell: Tell,
    reread: Callable[[], ServingConfig],
    flags: dict[str, Any],
) -> ExitCode:
    systemd = Systemd(os.environ)

    def tell_more(line: str, *, event: str, **fields: Any) -> None:
        systemd.hear(line, event)
        tell(f"{line}; once more to end it now" if event == "draining" else line, event=event, **fields)

    first = reread()
    run = ServiceRun(config, LocalLauncher(config, log_dir), tell_more, options=absolute(flags))

    def renew() -> None:
        """Takes of the configuration what may change while the service runs."""
        try:
            now = reread()
        except ConfigError as error:
            tell(f"error: {error}; the configuration stays as it was", event="refused", reason=str(error))
            run.reopen_logs()
        else:
            changed = [key for key in now.__struct_fields__ if getattr(now, key) != getattr(first, key)]
            if others := [key for key in changed if key != "logging"]:
                tell(
                    f"{', '.join(others)}: `baton rollout` brings what has changed there",
                    event="later",
                    sections=others,
                )
            run.reopen_logs(now.logging.level)

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, lambda: (run.hurry if run.stop.is_set() else run.stop).set())
    loop.add_signal_handler(signal.SIGHUP, run.stop.set if _has_terminal() else renew)
    watching = asyncio.create_task(systemd.watch(run.answers))
    try:
        return ExitCode.OK if await run.run() else ExitCode.FAILED
    finally:
        await end_tasks(watching)


def _has_terminal() -> bool:
    """Whether SIGHUP says that the terminal is gone. To others, such as logrotate, it means: open your logs anew."""
    try:
        os.close(os.open(TERMINAL, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _on_ray(
    wished: ServingConfig, services: Sequence[Wanted], flags: dict[str, Any], address: str, nodes: int, tell: Tell
) -> None:
    from baton.service.on_ray.cluster import connected, wait_for_nodes

    if wished.workers.announce is not None:
        raise ConfigError("workers.announce", "is one host, and on Ray each node has its own: leave it out")
    for service in services:
        check_start(service.config, service.files, None)
    with connected(address, wished.namespace):
        from baton.service.on_ray.commands import bring_up
        from baton.service.on_ray.launcher import RayLauncher

        wait_for_nodes(nodes, tell)
        machines = RayLauncher(wished).machines
        services = [service.suited(machines) for service in services]
        for service in services:
            _tell_choice(service, machines, tell)
        bring_up(with_absolute_paths(together(wished, services)), absolute(flags), tell)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags without those that were left out."""
    nested = {key: _given(value) if isinstance(value, dict) else value for key, value in flags.items()}
    return {key: value for key, value in nested.items() if value is not None and value != {}}
