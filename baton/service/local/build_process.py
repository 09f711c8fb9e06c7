"""Makes a process of this machine from a launch."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from baton.service.launcher import NATS, Launch
from baton.service.local.child_process import ChildProcess, environment
from baton.service.local.nats_server import HOST, NatsServer
from runtime.address import parse_address
from runtime.config.serving import ServingConfig, dump_config, load_config
from runtime.processes.other_python import interpreter, package_links, with_model_folder
from runtime.processes.process import Process
from runtime.processes.serving import CONFIG_VARIABLE
from runtime.security.keys import load_keys
from worker.engines.table import row_of


def build_process(
    launch: Launch,
    config: ServingConfig,
    folder: Path,
    log_file: Path | None,
    variables: Mapping[str, str] = {},
    nats_host: str = HOST,
) -> Process:
    """`config`: the launch's own, with what follows from the place. `folder`: for what the process writes; who removes
    the folder also removes what a killed process leaves. `variables`: more of its environment."""
    if launch.module == NATS:
        login = load_keys(config, launch.keys).nats
        port = _port(launch.addresses[NATS]) if launch.addresses else 0
        store = Path(config.nats.store_dir or folder / NATS)
        store = store / launch.name if launch.routes else store
        others = (route for name, route in launch.routes.items() if name != launch.name)
        routes = [launch.routes[launch.name], *others] if launch.routes else []
        return NatsServer(port, store, nats_host, log_file, login, folder, routes, launch.name)
    code = launch.generation.code
    python = None if code is None else Path(code.python)
    if code is not None:
        variables = {**variables, "PYTHONPATH": os.pathsep.join(code.paths)}
    if launch.module == "router" and launch.addresses:
        ports = {f"{api}_port": _port(address) for api, address in launch.addresses.items()}
        config = msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, **ports))
    if launch.workers and (row := row_of(config)).needs:
        python, config = interpreter(config, row.name, row.needs), with_model_folder(config)
        variables = {**variables, "PYTHONPATH": str(package_links(folder, code))}
    path = folder / f"{launch.name}.yaml"  # of its own: processes with one folder may have different engines
    path.write_text(dump_config(config))
    threads = config.engine.threads if launch.ranks else 1
    environ = {**environment(threads), **launch.keys, **variables, "TMPDIR": str(folder), CONFIG_VARIABLE: str(path)}
    return ChildProcess(
        launch.name, launch.module, ["--config", str(path), *launch.arguments], environ, log_file, python
    )


def renew(folder: Path, config: ServingConfig) -> None:
    """Changes what processes read again at SIGHUP, in their configurations in the folder."""
    for path in folder.glob("*.yaml"):
        own = load_config(path)
        logging = msgspec.structs.replace(own.logging, level=config.logging.level)
        planner = msgspec.structs.replace(own.planner, targets=config.planner.targets)
        path.write_text(dump_config(msgspec.structs.replace(own, logging=logging, planner=planner)))


def _port(address: str) -> int:
    """`address`: HOST:PORT, or a URL of it."""
    return parse_address(address.rpartition("/")[2])[1]
