"""Every test here starts a real engine: it takes a minute, and room for one."""

from pathlib import Path

import pytest

from tests.vllm.environment import needed_python


@pytest.fixture
def vllm_python() -> Path:
    return needed_python()
