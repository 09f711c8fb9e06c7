"""Compiled loops, with and without a folder to keep them in."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import pytest

from runtime.compiled import HASHES, compiled


def total(values: Any) -> int:
    result = 0
    for value in values:
        result += value
    return result


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_without_a_folder_that_can_be_written_it_is_compiled_all_the_same(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    njit = numba.njit
    asked: list[bool] = []

    def without_cache(signature: Any, cache: bool = False) -> Callable[[Any], Any]:
        asked.append(cache)
        if cache:
            raise error("cannot cache function: no locator available")
        compile_now: Callable[[Any], Any] = njit(signature)
        return compile_now

    monkeypatch.setattr("runtime.compiled.numba", SimpleNamespace(njit=without_cache))
    quick = compiled(HASHES, returns=numba.uint64)(total)
    assert asked == [True, False]
    assert quick(np.array([2**63, 5], dtype=np.uint64)) == 2**63 + 5


def test_bytes_and_arrays_are_taken_alike() -> None:
    quick = compiled(HASHES, returns=numba.uint64)(total)
    array = np.arange(10, dtype=np.uint64)
    assert quick(array) == quick(np.frombuffer(array.tobytes(), dtype="<u8")) == 45
