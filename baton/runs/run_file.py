"""The file of a run: where a service of this user listens, and the keys that its commands need.

Each run has a folder of mode 0700 in `$XDG_RUNTIME_DIR/baton`, or else in `~/.local/state/baton`, which is removed at
its end, or by the next command after a kill. Only somebody who could read the memory of the service can read its keys.
"""

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil
import structlog
from msgspec import Struct

from runtime.config.model_entry import model_namespace
from runtime.config.surroundings import NatsConfig
from runtime.errors import ConfigError
from runtime.own_files import SEEN, is_own, open_folder
from runtime.processes.owned_folder import OwnedFolder, living, write_private
from runtime.security.cluster_key import ClusterKey, TlsMode
from runtime.security.keys import CLUSTER_KEY_VARIABLE, OPERATOR_KEY_VARIABLE, Keys
from runtime.security.nats_login import TLS_SCHEME, each_url, find_login, split_url
from runtime.security.secret import MIN_LENGTH, Secret, parse_secrets

SERVICE_FLAG = "--service"
FORM = "run.json"
CLUSTER_KEY = "cluster.key"
OPERATOR_KEY = "operator.key"
INTERNAL_CA = "ca.pem"  # of the service's own processes, for who reads their metrics
SAME_START_S = 2.0  # by which two readings of a process's start may differ: the clock was set meanwhile
LOOPBACK = "127.0.0.1"
NATS_PORT = 4222
THIS_MACHINE: dict[str | None, str] = dict.fromkeys(("localhost", "0.0.0.0", "::"), LOOPBACK)

log = structlog.get_logger()


class RunFile(Struct, frozen=True):
    """Addresses are HOST:PORT, and empty until the service has them."""

    pid: int  # of `baton up`, or of the control actor on a Ray cluster
    started_s: float  # when that process started: another one may get its pid
    host: str
    namespace: str
    on_ray: bool = False
    log_dir: str | None = None
    nats: str = ""  # its URL, without a login
    grpc: str = ""
    http: str = ""
    models: list[str] = []  # their names, where several are served

    @property
    def namespaces(self) -> list[str]:
        """The service's own, and those of its models."""
        return [self.namespace, *(model_namespace(self.namespace, model) for model in self.models)]


@dataclass(frozen=True, slots=True)
class Run:
    """A service that runs on this machine."""

    folder: Path
    file: RunFile

    @property
    def name(self) -> str:
        return self.folder.name

    def __str__(self) -> str:
        return f"{self.name} (pid {self.file.pid}, {self.file.grpc or 'starting'})"

    def key(self, name: str) -> str | None:
        """CLUSTER_KEY or OPERATOR_KEY."""
        with contextlib.suppress(OSError):
            return (self.folder / name).read_text()
        return None


class OwnRun:
    """The run of this process. Where no file can be written, a warning is logged, and commands have to be told all."""

    def __init__(self, namespace: str, keys: Keys, on_ray: bool, log_dir: Path | None) -> None:
        started_s = psutil.Process().create_time()
        logs = None if log_dir is None else str(log_dir.absolute())
        self._file = RunFile(os.getpid(), started_s, socket.gethostname(), namespace, on_ray, logs)
        files = {FORM: msgspec.json.encode(self._file).decode()}
        if keys.cluster is not None:
            files[CLUSTER_KEY] = keys.cluster.secret.reveal()
            if keys.cluster.tls is not None:
                files[INTERNAL_CA] = keys.cluster.tls.authority.decode()
        if keys.operator:
            files[OPERATOR_KEY] = keys.operator[0].reveal()
        self._folder = _new_folder(namespace, files)

    def update(self, **fields: Any) -> None:
        """Changes fields of the file."""
        self._file = msgspec.structs.replace(self._file, **fields)
        if self._folder is not None and self._folder.path.exists():
            write_private(self._folder.path / FORM, msgspec.json.encode(self._file).decode())

    @property
    def name(self) -> str:
        return "" if self._folder is None else self._folder.path.name

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()


def runs() -> list[Run]:
    """This user's services on this machine. Removes what killed ones have left."""
    found = []
    for path in (path for folder in _folders() if is_own(folder, SEEN) for path in living(folder)):
        with contextlib.suppress(OSError, msgspec.DecodeError, psutil.Error):
            file = msgspec.json.decode((path / FORM).read_bytes(), type=RunFile)
            same = abs(psutil.Process(file.pid).create_time() - file.started_s) < SAME_START_S
            if file.host == socket.gethostname() and same:
                found.append(Run(path, file))
    return found


def choose_run(name: str | None, flag: str = SERVICE_FLAG) -> Run | None:
    """The run of that name, which `flag` gave; without a name the only one, None when there is none. Raises
    ConfigError."""
    known = runs()
    named = [run for run in known if name in (None, run.name)]
    shown = ", ".join(map(str, known)) or "none"
    if name is not None and not named:
        raise ConfigError(flag, f"no service {name!r} of yours runs on this machine; those that do: {shown}")
    if len(named) > 1:
        raise ConfigError(SERVICE_FLAG, f"several services of yours run on this machine; name one of: {shown}")
    return named[0] if named else None


def find_keys(url: str, namespace: str, environ: Mapping[str, str] = os.environ) -> Keys:
    """The keys of a command without a configuration: from variables, or from the service at that NATS server. Raises
    ConfigError."""
    there = [run for run in runs() if run.file.nats and _places(run.file.nats) & _places(url)]
    run = next((run for run in there if namespace in run.file.namespaces), None)
    key = environ.get(CLUSTER_KEY_VARIABLE) or (run and run.key(CLUSTER_KEY))
    mode: TlsMode = "auto" if urlsplit(url).scheme == TLS_SCHEME else "off"
    cluster = ClusterKey(parse_secrets(key, CLUSTER_KEY_VARIABLE, MIN_LENGTH)[0], mode) if key else None
    operator = find_operator_key(run, environ)
    login = find_login(NatsConfig(url=url), cluster, environ)
    return Keys(cluster, nats=login, operator=() if operator is None else (operator,))


def find_operator_key(run: Run | None, environ: Mapping[str, str] = os.environ) -> Secret | None:
    """Takes the key from the variable, or else from the run. Raises ConfigError."""
    key = environ.get(OPERATOR_KEY_VARIABLE) or (run and run.key(OPERATOR_KEY))
    return parse_secrets(key, OPERATOR_KEY_VARIABLE)[0] if key else None


def run_at(address: str) -> Run | None:
    """The run whose router has this gRPC address."""
    place = _place(f"//{address}")
    return next((run for run in runs() if run.file.grpc and _place(f"//{run.file.grpc}") == place), None)


def _new_folder(namespace: str, files: Mapping[str, str]) -> OwnedFolder | None:
    names = itertools.chain([namespace], (f"{namespace}-{number}" for number in itertools.count(2)))
    problem: OSError | None = None
    for folder in _folders():
        try:
            os.close(open_folder(folder, SEEN))
            living(folder)
            return OwnedFolder(folder, names, files)
        except OSError as error:
            problem = error
    log.warning("commands will not find this service by themselves", why=str(problem or "no home folder"))
    return None


def _folders() -> Iterator[Path]:
    """Where runs leave their files; the first one that can be used is written to."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        yield Path(runtime) / "baton"
    with contextlib.suppress(RuntimeError):  # no home folder
        yield Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "baton"


def _places(urls: str) -> set[tuple[str, int] | None]:
    return {_place(url) for url in each_url(urls)}


def _place(url: str) -> tuple[str, int] | None:
    """Host and port of a URL; None: it names none."""
    parts = urlsplit(split_url(url)[0])
    with contextlib.suppress(ValueError):
        return THIS_MACHINE.get(parts.hostname, parts.hostname or LOOPBACK), parts.port or NATS_PORT
    return None
