from pathlib import Path

import pytest

from tests.router.loop_lag import ORDINARY, fan_out_lags_s, lags_s

MAX_RATIO = 20.0  # of the lag with a hostile request to the lag with an ordinary one, which takes 2 ms to read
ROUNDS = 5

pytestmark = pytest.mark.slow


def beyond(lag: dict[str, float]) -> dict[str, float]:
    """Request -> ratio, of those above the limit."""
    ratios = {name: held_s / lag[ORDINARY] for name, held_s in lag.items()}
    return {name: ratio for name, ratio in ratios.items() if ratio > MAX_RATIO}


async def test_no_request_holds_the_event_loop_much_longer_than_an_ordinary_one(tiny_model: Path) -> None:
    lag = await lags_s(tiny_model, ROUNDS, enough=lambda measured: not beyond(measured))
    print({name: f"{1000 * held_s:.1f} ms" for name, held_s in lag.items()})
    assert {name.rpartition(" ")[2] for name in lag} == {"200", "400", "INVALID_ARGUMENT"}
    assert not beyond(lag)


async def test_no_request_of_a_thousand_answers_does_either(tiny_model: Path) -> None:
    lag = await fan_out_lags_s(tiny_model, ROUNDS, enough=lambda measured: not beyond(measured))
    print({name: f"{1000 * held_s:.1f} ms" for name, held_s in lag.items()})
    assert {name.rpartition(" ")[2] for name in lag} == {"200"}
    assert not beyond(lag)
