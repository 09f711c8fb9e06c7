"""What a container's limit leaves, read from files as the kernel shows them."""

from pathlib import Path

import pytest

from runtime.device import available_memory as module
from runtime.device.available_memory import left_in_groups

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{content}\n")


def left(root: Path, own: str) -> list[int]:
    (root / "own").write_text(own)
    return list(left_in_groups(root / "unified", root / "memory", root / "own"))


def test_a_limit_is_left_less_what_is_used_and_the_page_cache_does_not_count(tmp_path: Path) -> None:
    stat = f"anon {3 * GIB}\nfile {2 * GIB}\ninactive_file {GIB}"
    write(tmp_path / "unified", memory_max=8 * GIB, memory_current=5 * GIB, memory_stat=stat)
    assert left(tmp_path, "0::/\n") == [4 * GIB]


def test_the_memory_controller_of_cgroup_v1_is_read_too(tmp_path: Path) -> None:
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}"
    write(tmp_path / "memory", memory_limit_in_bytes=8 * GIB, memory_usage_in_bytes=5 * GIB, memory_stat=stat)
    own = "5:cpu,cpuacct:/a\n4:memory:/docker/0123\n0::/\n"
    assert left(tmp_path, own) == [4 * GIB], "the container's folder is the mount"


def test_a_limit_of_any_group_above_holds(tmp_path: Path) -> None:
    for name, limit in ((".", "max"), ("system.slice", 9 * GIB), ("system.slice/baton.service", 6 * GIB)):
        write(tmp_path / "unified" / name, memory_max=limit, memory_current=GIB, memory_stat="inactive_file 0")
    assert left(tmp_path, "0::/system.slice/baton.service\n") == [5 * GIB, 8 * GIB]


def test_a_group_that_uses_more_than_its_limit_has_nothing_left(tmp_path: Path) -> None:
    write(tmp_path / "unified", memory_max=GIB, memory_current=GIB + 1, memory_stat="inactive_file 0")
    assert left(tmp_path, "0::/\n") == [0]


@pytest.mark.parametrize("own", ["", "0::/gone\n", "4:memory:/gone\n"])
def test_where_there_is_no_limit_there_is_nothing_to_read(tmp_path: Path, own: str) -> None:
    assert left(tmp_path, own) == []
    assert list(left_in_groups(tmp_path, tmp_path, tmp_path / "missing")) == []


def test_the_least_of_what_is_free_and_what_the_limits_leave_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    for limits in ([2**60, 4096], [4096]):
        monkeypatch.setattr(module, "left_in_groups", lambda *_, limits=limits: iter(limits))
        assert module.available_bytes() == 4096
    monkeypatch.setattr(module, "left_in_groups", lambda *_: iter([]))
    assert module.available_bytes() > 4096
