"""A pytest plugin, for `-p tests.told_at_once`, that shows each failure when it happens, because a run on lent GPUs may
be ended before its summary."""

from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # pytest-xdist's processes report to the first one
        config.pluginmanager.register(_ToldAtOnce(config))


class _ToldAtOnce:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when}, after {report.duration:.1f} s)")
            terminal.write_line(report.longreprtext)
            terminal.flush()
