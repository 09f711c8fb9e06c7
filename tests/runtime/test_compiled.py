"""Compiled loops, with and without a folder to keep them in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from runtime.compiled import HASHES, compiled, inlined, load_compiled

SUM = compiled(f"uint64({HASHES})")


@inlined
def total(values: Any) -> int:
    result = 0
    for value in values:
        result += value
    return result


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_without_a_folder_that_can_be_written_it_is_compiled_all_the_same(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_compiled()  # registers inlined parts, before njit is another
    njit = numba.njit
    asked: list[bool] = []

    def without_cache(signature: Any, cache: bool = False) -> Callable[[Any], Any]:
        asked.append(cache)
        if cache:
            raise error("cannot cache function: no locator available")
        compile_now: Callable[[Any], Any] = njit(signature)
        return compile_now

    monkeypatch.setattr(numba, "njit", without_cache)
    assert SUM(total)(np.array([2**63, 5], dtype=np.uint64)) == 2**63 + 5
    assert asked == [True, False]


@pytest.mark.parametrize(("mode", "is_kept"), [(0o755, True), (0o1777, False)])
def test_nothing_is_taken_from_a_folder_that_others_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_kept: bool
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    folder = Path(numba.njit(None, cache=True)(total).stats.cache_path)
    folder.chmod(mode)
    assert SUM(total)(np.arange(10, dtype=np.uint64)) == 45
    assert bool(list(folder.iterdir())) == is_kept


def test_bytes_and_arrays_are_taken_alike() -> None:
    quick = SUM(total)
    array = np.arange(10, dtype=np.uint64)
    assert quick(array) == quick(np.frombuffer(array.tobytes(), dtype="<u8")) == 45


@SUM
def doubled(values: Any) -> int:
    return 2 * total(values)


def test_machine_code_takes_the_place_of_a_function_of_its_module() -> None:
    load_compiled()
    assert isinstance(doubled, numba.core.dispatcher.Dispatcher)
    assert doubled(np.arange(10, dtype=np.uint64)) == 90
