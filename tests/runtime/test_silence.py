"""How long a process counts as silent."""

from pathlib import Path

import pytest

from runtime.silence import Silence


def test_a_process_that_was_heard_just_before_a_look_is_not_silent_before_the_limit_is_over() -> None:
    silence = Silence(look_s=0.5, limit_s=2.0, pid=None)
    for _ in range(2):
        assert [silence.look() for _ in range(5)] == [False, False, False, False, True]
        silence.heard()


@pytest.mark.parametrize(("state", "hangs"), [("S", True), ("R", False), ("D", False)])
def test_who_waits_for_a_core_or_a_disk_does_not_hang(state: str, hangs: bool, tmp_path: Path) -> None:
    (tmp_path / "schedstat").write_text("4000000000 1000000000 7\n")
    (tmp_path / "stat").write_text(f"7 (a (router)) {state} 1 7\n")
    silence = Silence(look_s=0.5, limit_s=2.0, pid=7)
    silence._proc = tmp_path
    assert any(silence.look() for _ in range(20)) == hangs
