"""Nodes that Ray's cluster launcher reaches over SSH: loopback addresses of this machine, with an SSH server of the
test's own.

They share a PID namespace and a home folder, and nothing else is in either: `ray stop`, which ends every Ray process
that it sees, sees theirs alone, and whatever is left on them is found.
"""

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from typing import IO

import psutil
import pytest

LOOPBACK = "127.0.0.1"
# Of a cluster with several nodes. Not 127.0.0.1, in whose place Ray puts the machine's own address then.
ADDRESSES = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
SSH_PORT = 22  # the launcher knows no other
SSHD = "/usr/sbin/sshd"
PROGRAMS = (SSHD, "ssh", "ssh-keygen", "rsync", "setpriv", "unshare")
READY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class SshNodes:
    folder: Path  # removed with them

    @property
    def home(self) -> Path:
        """Of the user, on every node."""
        return self.folder / "home"

    @property
    def user_key(self) -> Path:
        return self.folder / "user_key"

    def processes(self) -> list[psutil.Process]:
        """All that somebody has started there."""
        return [process for process in psutil.process_iter() if self._is_there(process)]

    def listening(self) -> set[str]:
        """HOST:PORT of all that they listen on."""
        found = set()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                for socket_ in process.net_connections("inet"):
                    if socket_.status == psutil.CONN_LISTEN:
                        found.add(f"{socket_.laddr.ip.removeprefix('::ffff:')}:{socket_.laddr.port}")
        return found

    def _is_there(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.environ().get("HOME") == str(self.home)
        return False


@contextmanager
def ssh_nodes() -> Iterator[SshNodes]:
    """Skips the test, with the reason, where there cannot be any."""
    _skip_unless_possible()
    nodes = SshNodes(Path(tempfile.mkdtemp(prefix="bc-", dir="/tmp")))  # a short path: Ray puts sockets there
    try:
        _make_environment(nodes.home / "baton" / ".venv")
        with (nodes.folder / "sshd.log").open("w") as log, _sshd(nodes, log):
            yield nodes
    finally:
        shutil.rmtree(nodes.folder)
        shutil.rmtree(_launchers_sockets(nodes.folder.name), ignore_errors=True)


def _skip_unless_possible() -> None:
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root: the launcher knows SSH on port 22 alone")
    namespace = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, text=True, check=False)
    if namespace.returncode:
        pytest.skip(f"needs a PID namespace: {namespace.stderr}")
    for address in (LOOPBACK, *ADDRESSES):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, SSH_PORT))
            except OSError as error:
                pytest.skip(f"port {SSH_PORT} of {address} is somebody else's: {error}")


def _make_environment(venv: Path) -> None:
    """An empty one that finds the packages which this test runs with: `make env` has only Baton itself to install. The
    program `ray` as pip would have made it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "packages_of_the_test.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _, ray = Path(sys.prefix, "bin", "ray").read_text().split("\n", 1)
    _write_program(venv / "bin" / "ray", f"#!{venv}/bin/python\n{ray}")
    # ssh itself looks `~` up in /etc/passwd, which names another home folder.
    _write_program(venv / "bin" / "ssh", f'#!/bin/bash\nexec {shutil.which("ssh")} "${{@/#\\~/$HOME}}"\n')


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@contextmanager
def _sshd(nodes: SshNodes, log: IO[str]) -> Iterator[None]:
    """What was started over it ends with it, and all of it with the test."""
    namespace = ["setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    Path("/run/sshd").mkdir(exist_ok=True)  # it does not start without
    process = subprocess.Popen([*namespace, SSHD, "-D", "-e", "-f", str(_sshd_config(nodes))], stderr=log)
    try:
        _wait_until_ready(process, Path(log.name))
        yield
    finally:
        process.kill()
        process.wait()
        psutil.wait_procs(nodes.processes(), READY_TIMEOUT_S)


def _sshd_config(nodes: SshNodes) -> Path:
    for key in (nodes.user_key, nodes.folder / "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    variables = {"HOME": nodes.home, "RAY_TMPDIR": nodes.folder / "nodes", "PYTHON": sys.executable}
    variables |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    settings = [
        f"Port {SSH_PORT}",
        *(f"ListenAddress {address}" for address in (LOOPBACK, *ADDRESSES)),
        f"HostKey {nodes.folder}/host_key",
        f"AuthorizedKeysFile {nodes.user_key}.pub",
        "StrictModes no",  # /tmp is everybody's
        "PermitRootLogin prohibit-password",
        "PidFile none",
        "SetEnv " + " ".join(f'"{name}={value}"' for name, value in variables.items()),
    ]
    path = nodes.folder / "sshd_config"
    path.write_text("\n".join(settings) + "\n")
    return path


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((ADDRESSES[-1], SSH_PORT), 1.0):
            return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.05)


def _launchers_sockets(cluster_name: str) -> Path:
    """Of its SSH connections, wherever TMPDIR points."""
    user, cluster = (hashlib.sha256(name.encode()).hexdigest()[:10] for name in (getuser(), cluster_name))
    return Path(f"/tmp/ray_ssh_{user}/{cluster}")
