from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.kvtransfer.ranks import RankProcesses


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with closing(RankProcesses()) as processes:
        yield processes
