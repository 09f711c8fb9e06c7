"""Triton kernels run in Triton's interpreter where there is no GPU; it has to be told before they are imported."""

import os
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.forked import rank_process

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="session")
def forked_ranks() -> Iterator[None]:
    """Ranks 1 and above, which are not on GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            names = SimpleNamespace(**vars(subprocess) | {"Popen": rank_process})
            patch.setattr("engine.ranks.ranks.subprocess", names)
        yield
