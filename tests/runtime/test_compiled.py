"""Compiled loops, with and without a folder to keep them in."""

from collections.abc import Callable
from pathlib import Path
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


@pytest.mark.parametrize(("mode", "is_kept"), [(0o755, True), (0o1777, False)])
def test_nothing_is_taken_from_a_folder_that_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_kept: bool
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    folder = Path(numba.njit(None, cache=True)(total).stats.cache_path)
    folder.chmod(mode)
    assert compiled(HASHES, returns=numba.uint64)(total)(np.arange(10, dtype=np.uint64)) == 45
    assert bool(list(folder.iterdir())) == is_kept


def test_bytes_and_arrays_are_taken_alike() -> None:
    quick = compiled(HASHES, returns=numba.uint64)(total)
    array = np.arange(10, dtype=np.uint64)
    assert quick(array) == quick(np.frombuffer(array.tobytes(), dtype="<u8")) == 45
