"""What a stranger can have written is not used, and nothing of ours is written through it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.own_files import SEEN, WRITTEN, is_own, may_be_replaced, open_file, open_folder


def refusal(path: Path, taboo: int = WRITTEN) -> str:
    with pytest.raises(OSError) as refused:  # noqa: PT011 - what it says is looked at
        os.close(open_folder(path, taboo))
    assert not is_own(path, taboo)
    return str(refused.value)


def test_a_folder_is_made_for_us_alone_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        os.close(open_folder(tmp_path / "above" / "own", SEEN))
    finally:
        os.umask(umask)
    assert (tmp_path / "above" / "own").stat().st_mode & 0o777 == 0o700
    assert is_own(tmp_path / "above" / "own", SEEN)
    assert not is_own(tmp_path / "missing")


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o770, 0o702, 0o2775])
def test_a_folder_that_others_may_write_is_refused_with_a_way_out(tmp_path: Path, mode: int) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder").chmod(mode)
    said = refusal(tmp_path / "a folder")
    assert said.startswith(f"{tmp_path}/a folder lets others write it (mode {mode:04o}): name one that does not exist")
    assert said.endswith(f"chmod go-w '{tmp_path}/a folder'")


def test_a_folder_that_others_may_read_holds_what_they_may_see(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert is_own(tmp_path)
    assert "lets others read it (mode 0755)" in refusal(tmp_path, SEEN)


def test_a_strangers_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid() + 7
    (tmp_path / "theirs").mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / "theirs", owner, owner)
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 7)
    assert f"belongs to user {owner}, not to {os.geteuid()}: name one that does not" in refusal(tmp_path / "theirs")


@pytest.mark.parametrize(("mode", "replaceable"), [(0o1777, False), (0o755, False), (0o777, True), (0o775, True)])
def test_only_a_sticky_bit_keeps_others_from_replacing_what_is_ours(
    tmp_path: Path, mode: int, replaceable: bool
) -> None:
    tmp_path.chmod(mode)
    assert may_be_replaced(tmp_path) == replaceable


def test_a_link_is_no_folder_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("ours")
    assert refusal(tmp_path / "link") == f"{tmp_path}/link is a symbolic link: name what it leads to"
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    folder = open_folder(tmp_path)
    with pytest.raises(PermissionError, match=r"/dangling is a symbolic link: remove it"):
        open_file("dangling", os.O_RDWR | os.O_CREAT, within=folder)
    os.close(folder)
    assert not (tmp_path / "elsewhere").exists()


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "symbolic link": lambda path, victim: path.symlink_to(victim),
    "second name": lambda path, victim: path.hardlink_to(victim),
    "no plain file": lambda path, _: os.mkfifo(path, 0o600),
    "lets others read": lambda path, _: path.touch(0o644),
    "lets others write": lambda path, _: (path.touch(), path.chmod(0o602))[1],
}


@pytest.mark.parametrize("problem", PLANTED)
def test_a_file_that_was_laid_there_is_refused_and_untouched(tmp_path: Path, problem: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    victim.chmod(0o600)
    PLANTED[problem](tmp_path / "index", victim)
    folder = open_folder(tmp_path)
    with pytest.raises(PermissionError, match=rf"{tmp_path}/index .*{problem}.*: "):
        open_file("index", os.O_RDWR | os.O_CREAT, within=folder)
    os.close(folder)
    assert victim.read_text() == "precious"
