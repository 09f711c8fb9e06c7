"""The control groups of this process: where a container's limits stand."""

from collections.abc import Iterator
from pathlib import Path

UNIFIED = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def group_folders(controller: str, unified: Path, mounted: Path, own: Path) -> Iterator[tuple[Path, bool]]:
    """Each folder that may hold files of the controller for one of our groups, and whether it is of cgroup v2.

    unified, mounted: where cgroup v2 and this controller of v1 are mounted. own: the groups' names, a hierarchy a line.
    Where a container shows its own group alone, a name may not be found below the mount, which is that group.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux, or no /proc
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = Path(name.lstrip("/"))
        for folder in (group, *group.parents):  # a limit holds for all groups below
            yield (mounted if controllers else unified) / folder, not controllers
