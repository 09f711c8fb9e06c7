"""How much more memory of this host the process may take, containers' limits included."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

UNIFIED, MEMORY = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")


class _Files(NamedTuple):
    """Names of a control group's files: its limit, what its processes use with their page cache, and the part of that
    cache, a line of memory.stat, that the kernel takes back first."""

    limit: str
    usage: str
    cache: str


_OF_UNIFIED = _Files("memory.max", "memory.current", "inactive_file")  # cgroup v2
_OF_MEMORY = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")  # cgroup v1


def available_bytes() -> int:
    """Memory of this host that is free, or that the kernel gives back, page cache say. If the control groups of the
    process leave less of their limits, that."""
    return min([psutil.virtual_memory().available, *left_in_groups(UNIFIED, MEMORY, Path("/proc/self/cgroup"))])


def left_in_groups(unified: Path, memory: Path, own: Path) -> Iterator[int]:
    """Bytes that are left in each of the process's groups that has a limit.

    unified, memory: where cgroup v2 and the memory controller of v1 are mounted. own: the groups' names, a hierarchy a
    line. Where a container shows its own group alone, a name may not be found below the mount, which is that group.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux, or no /proc
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            root, files = unified, _OF_UNIFIED
        elif "memory" in controllers.split(","):
            root, files = memory, _OF_MEMORY
        else:
            continue
        group = Path(name.lstrip("/"))
        for folder in (group, *group.parents):  # a limit holds for all groups below
            if (left := _left(root / folder, files)) is not None:
                yield left


def _left(folder: Path, files: _Files) -> int | None:
    try:
        limit = (folder / files.limit).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / files.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, int(limit) - usage + int(stat.get(files.cache, 0)))
