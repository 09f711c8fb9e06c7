"""How the open files of a process are shared out."""

import subprocess
import sys

import pytest

from runtime.processes.open_files import WANTED, Places, shared_out

RAISE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
from runtime.processes.open_files import raise_open_files
print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("limit", "places"),
    [(WANTED, Places(4096, 4096)), (1024, Places(512, 256)), (256, Places(128, 64)), (4, Places(2, 1))],
)
def test_workers_and_nats_keep_a_part_whatever_the_limit(limit: int, places: Places) -> None:
    assert shared_out(limit, 4096) == places
    assert places.http + places.grpc <= limit - min(1024, limit // 4)


def test_the_soft_limit_becomes_the_hard_one() -> None:
    done = subprocess.run([sys.executable, "-c", RAISE.format(hard=300)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["300", "300"], done.stderr
