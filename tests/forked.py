"""The processes of services that run in tests are forked from processes that have imported their modules, because
importing torch takes a second of CPU and all else of a worker's start 0.05 s. Tests of commands and of Ray start them
as users do.

Run as a program, this file is a process that is forked: it imports its arguments, and forks for each connection.
"""

import asyncio
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from subprocess import Popen, TimeoutExpired
from typing import IO, Any, NamedTuple

from baton.service.local.child_process import STDOUT_LIMIT_BYTES, ChildProcess, environment
from runtime.compiled import load_compiled
from runtime.processes.die_with_parent import die_with_parent

LIGHT = ("router.process", "baton.service.many_workers")
HEAVY = ("worker.lives", "decode_worker.decode_worker", "prefill_worker.prefill_worker", "engine.loading.loaded_model")
IMPORTED = {
    "router": LIGHT,
    "baton.service.many_workers": LIGHT,
    "prefill_worker": HEAVY,
    "decode_worker": HEAVY,
    "engine.ranks.rank_process": ("engine.ranks.rank_process",),
}
"""Module of a process -> what is imported before it is forked. Mock workers must do without torch."""
MAX_REQUEST_BYTES = 1 << 16
MAX_DESCRIPTORS = 32
ABOVE = 500  # descriptors that nobody has


class Request(NamedTuple):
    module: str
    arguments: Sequence[str]
    environment: dict[str, str]
    inherited: Sequence[int] = ()  # descriptors that keep their numbers


class Forked:
    """What ChildProcess asks of an asyncio.subprocess.Process."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = asyncio.StreamReader(STDOUT_LIMIT_BYTES)
        self._ended = asyncio.ensure_future(self._end(connection))

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    async def _end(self, connection: socket.socket) -> int:
        # Closed at once: a transport is closed on the next turn of the loop, and there may be none.
        with connection:
            self.returncode = int(await _line(connection) or -signal.SIGKILL)
        return self.returncode


async def _line(connection: socket.socket) -> bytes:
    """Empty: the other end has closed."""
    line, loop = b"", asyncio.get_running_loop()
    while not line.endswith(b"\n") and (byte := await loop.sock_recv(connection, 1)):
        line += byte
    return line


class ForkedChild(ChildProcess):
    """Forked where somebody has imported the module."""

    async def _spawned(self, stderr: IO[bytes] | None) -> asyncio.subprocess.Process:
        module, *arguments = self.command[self.command.index("runtime.processes.launch") + 2 :]
        forkable = self.command[0] == sys.executable and self._environment["OMP_NUM_THREADS"] == "1"
        forkable &= self._environment.get("PYTHONPATH") == os.environ.get("PYTHONPATH")  # else it is of other code
        if module not in IMPORTED or stderr is None or not forkable:
            return await super()._spawned(stderr)
        forked: Any = await fork(Request(module, arguments, self._environment), stderr.fileno())
        return forked


def rank_process(command: Sequence[str], *, pass_fds: Sequence[int], **options: Any) -> "ForkedRank | Popen[bytes]":
    """A rank of an engine in this process; not forked where nobody has imported its module."""
    module, *arguments = command[command.index("runtime.processes.launch") + 2 :]
    if module not in IMPORTED:
        return Popen(command, pass_fds=pass_fds, **options)
    return ForkedRank(asked(Request(module, arguments, dict(os.environ), pass_fds), 2, 2))


class ForkedRank:
    """What RankProcess asks of a Popen."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._returncode: int | None = None
        self.pid = self._heard()

    def wait(self, timeout: float | None = None) -> int:
        if self._returncode is None:
            self._connection.settimeout(timeout)
            try:
                self._returncode = self._heard()
            except (TimeoutError, BlockingIOError):
                raise TimeoutExpired(str(self.pid), timeout or 0.0) from None
            self._connection.close()
        return self._returncode

    def kill(self) -> None:
        if self._returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def _heard(self) -> int:
        line = b""
        while not line.endswith(b"\n") and (byte := self._connection.recv(1)):
            line += byte
        return int(line or -signal.SIGKILL)


def asked(request: Request, stdout: int, stderr: int) -> socket.socket:
    """Starts a process that runs the module as `python -m` does. The connection tells its pid, a line, and when it has
    ended its code."""
    connection, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(_forks(IMPORTED[request.module]), [b"+"], [theirs.fileno()])
    socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [stdout, stderr, *request.inherited])
    return connection


async def fork(request: Request, stderr: int) -> Forked:
    ours, stdout = os.pipe()
    connection = asked(request, stdout, stderr)
    os.close(stdout)
    connection.setblocking(False)
    try:
        pid = int(await _line(connection))
    except BaseException:
        connection.close()
        os.close(ours)
        raise
    forked = Forked(pid, connection)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(forked.stdout), os.fdopen(ours, "rb")
    )
    return forked


@cache
def _forks(modules: Sequence[str]) -> socket.socket:
    """Takes the connections of a process that has imported them, and ends with this one."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.set_inheritable(True)
        command = [sys.executable, "-P", __file__, str(os.getpid()), str(theirs.fileno()), *modules]
        os.posix_spawn(sys.executable, command, environment(1), setsid=True)
    return ours


def main() -> None:
    _, parent, descriptor, *modules = sys.argv
    die_with_parent(int(parent))
    for module in modules:
        importlib.import_module(module)
    load_compiled()
    gc.collect()
    gc.freeze()
    me = os.getpid()
    request = _serve(socket.socket(fileno=int(descriptor)))
    die_with_parent(me)
    sys.argv = [request.module, *request.arguments]
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def _serve(control: socket.socket) -> Request:
    """Returns in each forked process what that one is to run."""
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    while True:
        pids = {connection: pid for pid, connection in children.items()}
        for source in select.select([control, wake, *pids], [], [])[0]:
            if source is wake:
                wake.recv(4096)
                _tell_ends(children)
                continue
            if source is not control:
                if pids[source] in children:  # closed by who asked for it, perhaps before it was told the pid
                    os.kill(pids[source], signal.SIGKILL)
                continue
            said, given, _, _ = socket.recv_fds(control, 1, 1)
            if not said:
                sys.exit()
            connection = socket.socket(fileno=given[0])
            data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
            while not data.endswith(b"\n"):
                data += connection.recv(MAX_REQUEST_BYTES)
            pid = os.fork()
            if not pid:
                for one in (control, wake, woken, connection, *children.values()):
                    one.close()
                return _become(Request(*json.loads(data)), descriptors)
            children[pid] = connection
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % pid)
            for each in descriptors:
                os.close(each)


def _tell_ends(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with contextlib.suppress(OSError), children.pop(pid) as connection:
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become(request: Request, descriptors: Sequence[int]) -> Request:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    own = [os.open(os.devnull, os.O_RDONLY), *descriptors]
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, ABOVE) for descriptor in own]
    for descriptor in own:
        os.close(descriptor)
    for descriptor, place in zip(moved, (0, 1, 2, *request.inherited), strict=True):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    tempfile.tempdir = None
    return request


if __name__ == "__main__":
    main()
