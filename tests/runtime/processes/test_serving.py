"""What a process does at a signal."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig, dump_config
from runtime.processes import serving
from runtime.processes.serving import CONFIG_VARIABLE, LOG_VARIABLE, stop_signal


async def test_at_sighup_a_process_reads_its_configuration_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "serving.yaml"
    monkeypatch.setenv(LOG_VARIABLE, str(tmp_path / "log"))
    monkeypatch.setenv(CONFIG_VARIABLE, str(path))
    monkeypatch.setattr(serving, "reopen_log", lambda path, file: None)  # this process's stderr stays
    monkeypatch.setattr(serving, "set_level", lambda level: None)
    stop, read = stop_signal(), asyncio.Queue[ServingConfig]()
    stop.renewed.append(read.put_nowait)
    wanted = with_overrides(ServingConfig(), {"planner": {"targets": {"itl_ms": 7.0}}})
    try:
        path.write_text(dump_config(wanted))
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(5):
            assert await read.get() == wanted
        assert not stop.is_set()
    finally:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
