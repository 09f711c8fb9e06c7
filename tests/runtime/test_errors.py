"""What errors say."""

import pytest

from runtime.errors import DeadlineError, InvalidRequestError, shown


@pytest.mark.parametrize(
    ("timeout_s", "words"),
    [(0.05, "0.05 s"), (0.0489, "0.049 s"), (0.001, "0.001 s"), (2.0, "2.0 s"), (600, "600.0 s")],
)
def test_a_deadline_is_never_told_as_none(timeout_s: float, words: str) -> None:
    assert str(DeadlineError("the request", timeout_s)) == f"the request did not finish within {words}"


def test_a_deadline_that_had_passed_before_is_told_as_such() -> None:
    assert str(DeadlineError("the request", -0.0003)) == "the request was late before it began"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a b", "'a b'"),
        ("a " * 60, f"'{'a ' * 50}'..."),
        (None, "None"),
        ([1] * 60, f"[{'1, ' * 33}..."),
    ],
)
def test_a_value_of_any_length_ends_before_the_sentence_goes_on(value: object, words: str) -> None:
    assert shown(value) == words


def test_a_refusal_repeats_no_number_of_any_length() -> None:
    error = InvalidRequestError("n", f"is {'9' * 4000}, must be at most 8")
    assert error.problem == f"is {'9' * 100}..., must be at most 8"
    assert str(error) == f"n: {error.problem}"
