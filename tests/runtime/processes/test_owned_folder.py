"""Folders end with their owners, and never before them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.processes.owned_folder import PREFIX, OwnedFolder, living, temporary_folder

OWN = """
import sys
from pathlib import Path
from runtime.processes.owned_folder import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]), [sys.argv[2]], {"file": "text"})
print("made", flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(parent: Path, name: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that owns the folder."""
    command = [sys.executable, "-c", OWN, str(parent), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_next_owner_removes_what_killed_processes_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "baton-strange").mkdir()
    with owner(tmp_path, f"{PREFIX}dead") as dead, owner(tmp_path, f"{PREFIX}alive"):
        dead.kill()
        dead.wait()
        assert (tmp_path / f"{PREFIX}dead" / "file").read_text() == "text"
        folder = temporary_folder()
        assert {path.name for path in tmp_path.iterdir()} == {"baton-strange", f"{PREFIX}alive", folder.path.name}
        assert folder.path.stat().st_mode & 0o777 == 0o700
        folder.close()
        assert not folder.path.exists()


def test_a_name_that_is_taken_is_left_to_its_owner(tmp_path: Path) -> None:
    first = OwnedFolder(tmp_path, ["one"], {"file": "1"})
    second = OwnedFolder(tmp_path, ["one", "two"], {"file": "2"})
    assert [folder.path.name for folder in (first, second)] == ["one", "two"]
    assert [path.name for path in living(tmp_path)] == ["one", "two"]
    first.close()
    first.close()
    assert [path.name for path in living(tmp_path)] == ["two"]
    with pytest.raises(FileExistsError):
        OwnedFolder(tmp_path, ["two"], {"file": "3"})
    assert (tmp_path / "two" / "file").read_text() == "2"
    second.close()


def test_folders_and_links_of_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"{PREFIX}other"
    folder.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(folder)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert living(tmp_path, PREFIX + "*") == []
    assert len(list(tmp_path.iterdir())) == 2
