"""How many more threads and processes may be started here, containers' limits included."""

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from runtime.device.control_groups import OWN, UNIFIED, group_folders

PIDS = Path("/sys/fs/cgroup/pids")


def available_threads() -> float:
    """Infinite where there is no limit."""
    return min([math.inf, *_left_of_user(), *left_in_groups(UNIFIED, PIDS, OWN)])


def left_in_groups(unified: Path, pids: Path, own: Path) -> Iterator[int]:
    """What is left in each of the process's groups that has a limit; the paths are those of group_folders()."""
    for folder, _ in group_folders("pids", unified, pids, own):
        with suppress(OSError):
            limit = (folder / "pids.max").read_text().strip()
            if limit != "max":
                yield max(0, int(limit) - int((folder / "pids.current").read_text()))


def _left_of_user() -> Iterator[int]:
    """Root has no limit of this kind."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit == resource.RLIM_INFINITY or not os.geteuid():
        return
    processes = psutil.process_iter(["uids", "num_threads"])
    ours = (one.info for one in processes if one.info["uids"] and one.info["uids"].real == os.getuid())
    yield max(0, limit - sum(info["num_threads"] or 1 for info in ours))
