"""How much more memory of this host the process may take, containers' limits included."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from runtime.device.control_groups import OWN, UNIFIED, group_folders

MEMORY = Path("/sys/fs/cgroup/memory")


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
    return min([psutil.virtual_memory().available, *left_in_groups(UNIFIED, MEMORY, OWN)])


def left_in_groups(unified: Path, memory: Path, own: Path) -> Iterator[int]:
    """Bytes that are left in each of the process's groups that has a limit; the paths are those of group_folders()."""
    for folder, is_unified in group_folders("memory", unified, memory, own):
        if (left := _left(folder, _OF_UNIFIED if is_unified else _OF_MEMORY)) is not None:
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
