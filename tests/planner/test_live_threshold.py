"""The policy `threshold` at work on real processes: each decision is the rule's, worker by worker."""

from pathlib import Path
from statistics import fmean

import pytest

from baton_proto.planner import PREFILL, Observation
from planner.policy.threshold import QUEUE_HIGH, QUEUE_LOW
from tests.planner.live import Load, Planned, planned_service

pytestmark = pytest.mark.slow

THRESHOLD = {
    "policy": "threshold",
    "interval_s": 2.0,
    "limits": {"max_prefill": 3, "max_decode": 1},
}


async def test_workers_come_and_go_one_by_one_as_the_rule_says(tmp_path: Path) -> None:
    async with planned_service(tmp_path, 1, 1, THRESHOLD) as planned, Load(planned.service.client, rate=16.0) as load:
        await planned.until(lambda: len(planned.ready(PREFILL)) == 2)
        load.rate = 0.5
        await planned.until(lambda: bool(planned.effects("drain")) and planned.count() == (1, 1))
        assert load.failures == []
        the_rule_was_kept(planned)


def the_rule_was_kept(planned: Planned) -> None:
    """Written down once more, for prefill workers alone: no decode worker can come or go here."""
    followed = set()
    for decision in planned.decisions():
        observation, verbs = decision.observation, [action.verb for action in decision.target.actions]
        queue = [sample.queue for sample in observation.interval.samples]
        have = sum(worker.role == PREFILL for worker in observation.workers)
        if under_way(observation) or not queue:
            expected = []
        elif fmean(queue) < QUEUE_LOW and have > 1:
            expected = ["drain"]
        elif fmean(queue) > QUEUE_HIGH and queue[-1] + 3 * (queue[-1] - queue[0]) > QUEUE_HIGH and have < 3:
            expected = ["add"]
        else:
            expected = []
        assert verbs == expected, decision
        followed.update(verbs)
    assert followed == {"add", "drain"}


def under_way(observation: Observation) -> bool:
    counts = {(sample.prefill, sample.decode) for sample in observation.interval.samples}
    return len(counts) > 1 or any(worker.effect or worker.state != "ready" for worker in observation.workers)
