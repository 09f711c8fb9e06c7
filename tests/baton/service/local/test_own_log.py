"""Logs go to files of ours, or a sentence says why not."""

from pathlib import Path

import pytest

from baton.service.local.own_log import make_log_folder, opened_log
from runtime.errors import ConfigError


def test_nothing_is_logged_through_a_link_or_where_nobody_may_write(tmp_path: Path) -> None:
    (tmp_path / "victim").touch()
    (tmp_path / "decode-1.log").symlink_to("victim")
    with pytest.raises(ConfigError, match=r"^--log-dir: .*/decode-1\.log is a symbolic link: name what it leads to"):
        opened_log(tmp_path / "decode-1.log")
    for folder in (tmp_path / "victim", tmp_path / "victim" / "below", Path("/proc/no/logs")):
        with pytest.raises(ConfigError, match=f"^--log-dir: {folder}: "):
            make_log_folder(folder)
