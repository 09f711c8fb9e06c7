"""Fixtures that every part's tests share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.nats_server import NatsServer
from tests.tiny_model import write_tiny_model


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test was run again, which pytest does not tell of one that passes then."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"run again: {report.nodeid}")
        terminalreporter.write_line("\n".join(report.longreprtext.splitlines()[-40:]))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tiny random Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A real NATS server with JetStream on a free port."""
    server = NatsServer(store_dir=tmp_path / "nats")
    await server.start()
    yield server
    await server.stop()
