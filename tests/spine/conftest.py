"""Whole services are slow tests; `make test` runs those of a few files."""

from pathlib import Path

import pytest

from tests.spine.oracle import Oracle

# One service over each transport, whose workers are killed; every protocol; callers who leave, and bad ones.
QUICK = {
    "test_bad_input",
    "test_disconnects",
    "test_kept_answers",
    "test_lost_workers",
    "test_mock_workers",
    "test_protocols",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem not in QUICK:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)
