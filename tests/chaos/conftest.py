"""What the tests of chaos share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, because a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        yield Path(name)
