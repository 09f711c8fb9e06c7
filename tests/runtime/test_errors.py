"""What errors say."""

import pytest

from runtime.errors import DeadlineError


@pytest.mark.parametrize(
    ("timeout_s", "words"),
    [(0.05, "0.05 s"), (0.0489, "0.049 s"), (0.001, "0.001 s"), (2.0, "2.0 s"), (600, "600.0 s")],
)
def test_a_deadline_is_never_told_as_none(timeout_s: float, words: str) -> None:
    assert str(DeadlineError("the request", timeout_s)) == f"the request did not finish within {words}"
