"""What a process may take: descriptors and address space (prlimit), threads (the pids controller of cgroups)."""

import contextlib
import functools
import os
import resource
import subprocess
from pathlib import Path

import psutil

PIDS = Path("/sys/fs/cgroup/pids")
SPARE_DESCRIPTORS = 1
SPARE_BYTES = 4 << 20
SPARE_THREADS = 0

Limit = tuple[int, int]


@functools.cache
def why_no_limits() -> str:
    """Tried on a process that waits."""
    with subprocess.Popen(["sleep", "60"]) as waiting:
        try:
            raise_again(waiting.pid, resource.RLIMIT_AS, lower_memory(waiting.pid))
            raise_again(waiting.pid, resource.RLIMIT_FSIZE, lower_file_size(waiting.pid))
            raise_again(waiting.pid, resource.RLIMIT_NOFILE, lower_descriptors(waiting.pid))
            return ""
        except (OSError, AttributeError) as error:
            return f"the limits of another process cannot be changed here ({error})"
        finally:
            waiting.kill()


@functools.cache
def why_no_thread_limit() -> str:
    """Tried on a process that waits."""
    if not os.access(PIDS / "cgroup.procs", os.W_OK):
        return "no pids controller (cgroup v1) that we may write to"
    with subprocess.Popen(["sleep", "60"]) as waiting:
        try:
            lower_threads(waiting.pid)
            return ""
        except OSError as error:
            return f"the pids controller cannot be used here ({error})"
        finally:
            raise_threads(waiting.pid)
            waiting.kill()


def lower_descriptors(pid: int) -> Limit:
    """Returns the limit of a process that no fault has struck. Raises ProcessLookupError or FileNotFoundError when the
    process has ended."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)  # ours, which it got: two faults may strike one process
    if not (names := os.listdir(f"/proc/{pid}/fd")):
        raise ProcessLookupError(f"{pid} has just ended")
    highest = max(map(int, names))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1 + SPARE_DESCRIPTORS, before[1]))
    return before


def lower_memory(pid: int) -> Limit:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (psutil.Process(pid).memory_info().vms + SPARE_BYTES, before[1]))
    return before


def lower_file_size(pid: int) -> Limit:
    """No file may grow beyond 0 bytes: each write to a log fails with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    return before


def raise_again(pid: int, which: int, before: Limit) -> None:
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, which, before)


def lower_threads(pid: int) -> None:
    """Does nothing to a process that has just ended."""
    group = PIDS / f"batonchaos{pid}"
    group.mkdir(exist_ok=True)
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        (group / "cgroup.procs").write_text(str(pid))
        count = len(os.listdir(f"/proc/{pid}/task"))
        (group / "pids.max").write_text(str(count + SPARE_THREADS))


def raise_threads(pid: int) -> None:
    """The process goes back to the root group, and the group of its own goes."""
    group = PIDS / f"batonchaos{pid}"
    with contextlib.suppress(OSError):
        (group / "pids.max").write_text("max")
        for line in (group / "cgroup.procs").read_text().split():
            (PIDS / "cgroup.procs").write_text(line)
    with contextlib.suppress(OSError):
        group.rmdir()
