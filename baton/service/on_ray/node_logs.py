"""The logs of a service on one node: a folder of files in Ray's own folder of logs, which outlives their processes."""

import os
from pathlib import Path

import ray

from baton.service.logs.merged_logs import SUFFIX, Entry, MergedLogs


class NodeLogs:
    """An actor that reads them; to be placed on the node. Its answers: entries in order, and all names of processes."""

    def __init__(self, process: str | None) -> None:
        self._logs = MergedLogs(_folder(), process)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self._logs.tail(0)  # what the reader before it has read is not news

    def tail(self, lines: int) -> tuple[list[Entry], list[str]]:
        return self._logs.tail(lines), self._logs.processes()

    def news(self) -> tuple[list[Entry], list[str]]:
        return self._logs.news(), self._logs.processes()


def log_file(name: str) -> Path:
    """The log of a process of this actor's service on this node."""
    folder = _folder()
    folder.mkdir(exist_ok=True)
    return folder / f"{name}{SUFFIX}"


def show_own_log(name: str) -> None:
    """What this actor itself logs, by a link to the file that Ray has given it."""
    link = log_file(name)
    link.unlink(missing_ok=True)
    link.symlink_to(_own_stderr())


def _folder() -> Path:
    return _own_stderr().parent / str(ray.get_runtime_context().namespace)


def _own_stderr() -> Path:
    """The file in Ray's folder of logs that gets this actor's own output."""
    return Path(os.readlink("/proc/self/fd/2"))
