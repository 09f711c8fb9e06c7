"""The policy `slo` at work on real processes: four times the load, and back."""

import time
from pathlib import Path

import pytest

from baton_proto.planner import DECODE, PREFILL
from tests.planner.live import Load, planned_service

pytestmark = pytest.mark.slow

TTFT_S = 1.0
START_S = 6.0
SLO = {
    "policy": "slo",
    "targets": {"ttft_ms": TTFT_S * 1e3, "attainment": 0.95},
    "start_s": START_S,
}
CONSTANTS = {"slo.DOWN_AFTER_S": 4.0, "slo.BACKLOG_DRAIN_S": 5.0}


async def test_four_times_the_load_brings_workers_and_the_target_is_met_again_soon_after_their_start(
    tmp_path: Path,
) -> None:
    async with (
        planned_service(tmp_path, 1, 1, SLO, constants=CONSTANTS) as planned,
        Load(planned.service.client, rate=3.0) as load,
    ):
        await planned.until(lambda: len(load.answered) >= 20)
        assert load.p90_ttft_s(0.0) <= TTFT_S
        assert not planned.effects("add"), "one worker is enough for that"
        load.rate = 12.0
        await planned.until(lambda: len(planned.ready(PREFILL)) >= 2)
        await planned.until(lambda: load.p90_ttft_s(time.monotonic() - 3.0) <= TTFT_S, timeout_s=60.0)
        assert load.failures == []


async def test_a_quarter_of_the_load_lets_workers_drain_away_and_no_request_fails(tmp_path: Path) -> None:
    async with (
        planned_service(tmp_path, 3, 2, SLO, constants=CONSTANTS) as planned,
        Load(planned.service.client, rate=3.0) as load,
    ):
        await planned.until(lambda: planned.count() == (1, 1))
        assert [effect.error for effect in planned.effects("drain")] == [""] * 3
        seen = len(load.answered)
        await planned.until(lambda: len(load.answered) >= seen + 10)
        assert load.failures == []
        assert len(planned.service.workers(PREFILL) + planned.service.workers(DECODE)) == 2
