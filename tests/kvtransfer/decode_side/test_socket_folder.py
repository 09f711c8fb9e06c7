import os
import socket
import tempfile
from pathlib import Path

import pytest

from kvtransfer.decode_side.socket_folder import MIN_AGE_S, SOCKET, create_socket_folder


def grow_old(folder: Path) -> None:
    then = folder.stat().st_mtime - 2 * MIN_AGE_S
    os.utime(folder, (then, then))


def test_folders_of_dead_receivers_are_swept_out_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, empty, young = (create_socket_folder() for _ in range(4))
    stranger = tmp_path / "another-folder"
    stranger.mkdir()
    for folder in (dead, young):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(folder / SOCKET))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(alive / SOCKET))
        listener.listen()
        for folder in (dead, alive, empty, stranger):
            grow_old(folder)
        fresh = create_socket_folder()
    assert set(tmp_path.iterdir()) == {alive, young, stranger, fresh}
    assert fresh.stat().st_mode & 0o777 == 0o700
