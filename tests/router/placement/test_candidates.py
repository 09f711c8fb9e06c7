"""How likely each candidate was to be chosen, as `baton events explain` tells it."""

import math

import pytest

from router.placement import cost
from router.placement.candidates import Cost, chances


def costs(*totals: float | None) -> list[Cost]:
    """None: barred."""
    return [
        Cost(
            **dict.fromkeys(Cost.__annotations__, 0)
            | {"total": total or 0.0, "barred": cost.NO_ROOM if total is None else cost.FREE}
        )
        for total in totals
    ]


@pytest.mark.parametrize(
    ("totals", "temperature", "expected"),
    [
        ((1.0, 2.0), 0.0, [1.0, 0.0]),
        ((2.0, 1.0, 1.0), 0.0, [0.0, 0.5, 0.5]),
        ((None, 3.0), 0.0, [0.0, 1.0]),
        ((None, None), 0.0, [0.0, 0.0]),
        ((None, None), 1.0, [0.0, 0.0]),
        ((1.0, 1.0), 1.0, [0.5, 0.5]),
        ((0.0, 4.0, None), 0.5, [1 / (1 + math.exp(-2)), math.exp(-2) / (1 + math.exp(-2)), 0.0]),
    ],
)
def test_chances_follow_cost_and_temperature_and_a_barred_candidate_has_none(
    totals: tuple[float | None, ...], temperature: float, expected: list[float]
) -> None:
    assert chances(costs(*totals), temperature) == pytest.approx(expected)
