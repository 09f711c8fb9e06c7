"""Logs that stay when their service has ended are kept short as well, and nothing else in their folder is touched."""

from pathlib import Path

import pytest

from baton.service.launcher import Launch
from baton.service.local import local_launcher
from baton.service.local.local_launcher import LocalLauncher
from baton.service.logs import repeated_work
from baton.service.logs.log_file import older
from runtime.config.serving import parse_config


def test_in_a_folder_that_was_named_our_own_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_launcher, "KEPT_BYTES", 1000)
    monkeypatch.setattr(repeated_work, "INTERVAL_S", 0.001)
    config = parse_config({"model": "mock"})
    launcher = LocalLauncher(config, tmp_path)
    launcher.process(Launch("router-1", "router", config, ["--router-id", "router-1"]))
    ours, foreign = tmp_path / "router-1.log", tmp_path / "of-another-program.log"
    for path in (foreign, ours):
        path.write_bytes(b"x" * 5000)
    while not older(ours).exists() or ours.stat().st_size:
        pass
    launcher.close()
    assert older(ours).stat().st_size == foreign.stat().st_size == 5000
    assert not older(foreign).exists()
