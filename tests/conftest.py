"""Fixtures that every part's tests share."""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from structlog._config import BoundLoggerLazyProxy

from baton.service.local.nats_server import NatsServer
from runtime.nats.client import NatsClient, connect
from tests.clock import Clock
from tests.forked import ForkedChild
from tests.run_order import pytest_collection_modifyitems, pytest_xdist_make_scheduler
from tests.tiny_model import write_tiny_model

__all__ = ["pytest_collection_modifyitems", "pytest_xdist_make_scheduler"]


def pytest_configure() -> None:
    """Lets Ctrl-C reach the processes that tests start, although a shell that starts pytest in the background has them
    inherit an ignored SIGINT. Imports leave no garbage worth looking for."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()


def pytest_collection_finish() -> None:
    """Keeps collections, which tests ask for to find leaks, from visiting all modules and tests each time."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_run_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Services of the tests are found by their own commands alone, and find none of whoever runs the tests. What the
    commands print is as wide as in a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        patch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it, and commands obey it
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # else each process compiles all of Baton: 1 s of CPU
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True, scope="session")
def forked_services() -> Iterator[None]:
    """Services that a test starts by itself; not on GPUs, whose drivers may have begun something by then."""
    if os.environ.get("BATON_TEST_DEVICE", "cpu") != "cpu":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.service.local.build_process.ChildProcess", ForkedChild)
        yield


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """A machine stands still for seconds at times, and with it both ends of a connection that tests make."""
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("worker.stream_server.HELLO", "router.workers.link.HELLO", "engine.vllm.server.server.CONNECT"):
            patch.setattr(f"{limit}_TIMEOUT_S", 60.0)
        yield


# How long an example takes, and how long it takes to make one, says more about the machine than about the code.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(time.monotonic())
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Commands and processes configure logging for their whole process; tests must not leave that to each other."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    if structlog.is_configured():
        structlog.reset_defaults()
        for log in [getattr(module, "__dict__", {}).get("log") for module in list(sys.modules.values())]:
            if isinstance(log, BoundLoggerLazyProxy):
                vars(log).pop("bind", None)  # what it has kept of the configuration at its first line


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


@pytest.fixture
async def nats(nats_server: NatsServer) -> AsyncIterator[NatsClient]:
    client = await connect(nats_server.url, "test", timeout_s=60)
    yield client
    await client.close()
