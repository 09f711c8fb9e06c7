"""How long a call over gRPC may last."""

import pytest

from router.api.grpc.calling import left_s


class Context:
    def __init__(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s


@pytest.mark.parametrize(
    ("remaining_s", "left"), [(None, None), (0.04, 0.02), (0.5, 0.45), (2.0, 1.9), (5.0, 4.75), (600.0, 599.75)]
)
def test_a_call_ends_so_early_that_its_caller_hears_of_it_in_time(
    remaining_s: float | None, left: float | None
) -> None:
    assert left_s(Context(remaining_s)) == (left if left is None else pytest.approx(left))
