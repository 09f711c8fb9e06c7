"""Where a schema goes wrong is looked for within a bound of time."""

from collections.abc import Mapping
from typing import Any

import pytest

from runtime.grammar import faults
from runtime.grammar.faults import LOOKING_S, find_fault


def test_a_fault_is_looked_for_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    monkeypatch.setattr(faults.time, "thread_time", lambda: len(tries) * LOOKING_S / 10)

    def error_of(part: Mapping[str, Any]) -> str:
        tries.append(len(part))
        return "wrong" if "not" in part else "other"

    keywords = {f"a{number}": 1 for number in range(100)}
    deep: dict[str, Any] = keywords | {"not": {}}
    for _ in range(5):
        deep = {"items": deep, "not": {}}
    assert find_fault(deep, "wrong", error_of) == ("$" + ".items" * 5, "wrong"), "the keyword is not found in time"
    assert len(tries) == 10
