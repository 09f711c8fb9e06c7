"""`baton up`: a service in the foreground, until a signal drains it."""

import asyncio
import functools
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Struct

from baton.cli.preflight import check_start
from baton.cli.terminal.exit_codes import ExitCode, errors_reported
from baton.cli.terminal.options import RayAddressOption
from baton.cli.terminal.service_news import print_news
from baton.service.launcher import Machines, uses_gpus
from baton.service.local_launcher import LocalLauncher, this_machine
from baton.service.machine_defaults import described, suited
from baton.service.service_run import ServiceRun, Tell
from baton.service.systemd import Systemd
from baton.shadowing import refuse_shadowed
from runtime.checkpoint.model_files import ModelFiles, pinned
from runtime.checkpoint.served_model import is_mock, served_model
from runtime.config.overrides import merged, nested, with_overrides
from runtime.config.paths import with_absolute_paths
from runtime.config.serving import ServingConfig, load_config
from runtime.config.types import Workers
from runtime.config.workers import WorkerEngine
from runtime.config.yaml_file import read_yaml
from runtime.end_task import end_tasks
from runtime.errors import ConfigError
from runtime.telemetry.logging import configure_logging, set_level
from worker.engines.table import NAMES, block_size_elsewhere

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TERMINAL = "/dev/tty"
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
    str | None,
    _option(SETTINGS, "NAME_OR_PATH", "A model on the Hugging Face Hub, a folder, a .gguf file, smollm2 or mock."),
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


class Service(Struct, frozen=True):
    """A service that is to be: its configuration, what the user wrote of it, and its model."""

    config: ServingConfig
    given: dict[str, Any]
    files: ModelFiles

    def suited(self, machines: Machines) -> "Service":
        """Fills what the configuration leaves open with what suits the machines."""
        gpu = uses_gpus(self.config, machines)
        config = suited(self.config, self.given, self.files, gpu=gpu)
        if self.given.get("engine", {}).get("block_size", "auto") == "auto":
            size = block_size_elsewhere(config) or config.engine.block_size
            config = with_overrides(config, {"engine": {"block_size": size}}, "external_workers")
        return msgspec.structs.replace(self, config=config)

    def tell_choice(self, machines: Machines, tell: Tell) -> None:
        """Tells what the workers' engines take, chosen or configured."""
        if is_mock(self.config):
            return
        values = described(self.config, self.files, gpu=uses_gpus(self.config, machines))
        shown = ", ".join(f"{key} {value}" for key, value in values.items())
        tell(f"{self.config.model}: {shown}", event="engine", model=self.config.model, **values)


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
        "model": model,
        "namespace": namespace,
        "workers": {"prefill": prefill, "decode": decode},
        "router": {"http_port": http_port},
        "planner": {"enabled": planner},
    }
    with errors_reported():
        flags = functools.reduce(merged, map(nested, settings or ()), _given(flags))
        service = _service(config, flags)
        tell = partial(print_news, as_json)
        if ray:
            if log_dir is not None:
                raise ConfigError("--log-dir", "is not for --ray: logs stay on their nodes; `baton logs` shows them")
            _on_ray(service, address, nodes, tell)
            return
        machine = this_machine()
        service = service.suited(machine)
        check_start(service.config, service.files, machine)
        service.tell_choice(machine, tell)
        reread = partial(_configuration, config, flags)
        code = asyncio.run(_in_foreground(service.config, log_dir, tell, reread))
    raise typer.Exit(code)


def _service(path: Path | None, flags: dict[str, Any]) -> Service:
    """Fetches or converts the model, once, with its progress on the terminal. Raises ConfigError, ModelError."""
    config = _configuration(path, flags)
    configure_logging(config.logging, "baton")
    files = served_model(config, progress=True)
    config = msgspec.structs.replace(config, model=pinned(config.model, files))
    return Service(config, flags if path is None else merged(read_yaml(path), flags), files)


def _configuration(path: Path | None, flags: dict[str, Any]) -> ServingConfig:
    """Raises ConfigError."""
    return with_overrides(load_config(path), flags, "flags")


async def _in_foreground(
    config: ServingConfig, log_dir: Path | None, tell: Tell, reread: Callable[[], ServingConfig]
) -> ExitCode:
    systemd = Systemd(os.environ)

    def tell_more(line: str, *, event: str, **fields: Any) -> None:
        systemd.hear(line, event)
        tell(f"{line}; once more to end it now" if event == "draining" else line, event=event, **fields)

    launcher, first = LocalLauncher(config, log_dir), reread()
    run = ServiceRun(config, launcher, tell_more)

    def renew() -> None:
        """Takes of the configuration what may change while the service runs."""
        try:
            now = reread()
        except ConfigError as error:
            tell(f"error: {error}; the configuration stays as it was", event="refused", reason=str(error))
        else:
            set_level(now.logging.level)
            launcher.change_log_level(now.logging.level)
            changed = [key for key in now.__struct_fields__ if getattr(now, key) != getattr(first, key)]
            if others := [key for key in changed if key != "logging"]:
                tell(
                    f"{', '.join(others)}: what has changed there holds from the next start on",
                    event="later",
                    sections=others,
                )
        run.reopen_logs()

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


def _on_ray(service: Service, address: str, nodes: int, tell: Tell) -> None:
    from baton.service.on_ray.cluster import connected, wait_for_nodes

    if service.config.workers.announce is not None:
        raise ConfigError("workers.announce", "is one host, and on Ray each node has its own: leave it out")
    check_start(service.config, service.files, None)
    with connected(address, service.config.namespace):
        from baton.service.on_ray.commands import bring_up
        from baton.service.on_ray.launcher import RayLauncher

        wait_for_nodes(nodes, tell)
        machines = RayLauncher(service.config).machines
        service = service.suited(machines)
        service.tell_choice(machines, tell)
        bring_up(with_absolute_paths(service.config), tell)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags without those that were left out."""
    nested = {key: _given(value) if isinstance(value, dict) else value for key, value in flags.items()}
    return {key: value for key, value in nested.items() if value is not None and value != {}}
