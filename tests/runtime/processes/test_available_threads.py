"""How many threads a container's limit leaves, read from files as the kernel shows them."""

from pathlib import Path

from runtime.processes.available_threads import left_in_groups


def test_the_limits_of_all_groups_above_hold_in_either_hierarchy(tmp_path: Path) -> None:
    for name, limit, used in (("unified", "max", 9), ("unified/a", 40, 9), ("unified/a/b", 20, 5), ("pids", 7, 8)):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "pids.max").write_text(f"{limit}\n")
        (tmp_path / name / "pids.current").write_text(f"{used}\n")
    (tmp_path / "own").write_text("8:pids:/gone\n5:memory:/a\n0::/a/b\n")
    assert list(left_in_groups(tmp_path / "unified", tmp_path / "pids", tmp_path / "own")) == [0, 15, 31]
