"""The planner's memory between two lives."""

import pytest

from planner.planner import Planner
from runtime.config.planner import PlannerConfig
from runtime.errors import ConfigError
from tests.planner.observations import interval, observation, workers


def used(policy: str) -> Planner:
    planner = Planner(PlannerConfig(policy=policy))
    for number in range(50):
        planner.decide(observation(5.0 * number, workers(1, 1), interval(500)))
    return planner


@pytest.mark.parametrize("policy", ["slo", "threshold"])
def test_what_is_saved_is_what_is_restored(policy: str) -> None:
    first = used(policy)
    second = Planner(PlannerConfig(policy=policy))
    second.restore(first.saved())
    assert second.saved() == first.saved()


def test_what_is_saved_stays_small() -> None:
    assert len(used("slo").saved()) < 64 * 1024


def test_another_policy_takes_over_what_the_guards_remember_and_nothing_else() -> None:
    heir = Planner(PlannerConfig(policy="threshold"))
    heir.restore(used("slo").saved())
    assert b'"policy":"threshold"' in heir.saved()
    assert b'"up_s":' in heir.saved()


@pytest.mark.parametrize("data", [b"", b"{}", b'{"version": 1, "policy": 3}'])
def test_a_state_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="planner state"):
        Planner(PlannerConfig()).restore(data)


def test_a_state_of_another_version_is_refused() -> None:
    data = Planner(PlannerConfig()).saved().replace(b'"version":1', b'"version":9')
    with pytest.raises(ConfigError, match="version 9"):
        Planner(PlannerConfig()).restore(data)


def test_workers_that_are_added_get_names_that_nobody_has() -> None:
    planner = Planner(PlannerConfig())
    views = workers(0, 30)  # decode-0 to decode-29
    target = planner.decide(observation(0.0, views, interval(0)))
    assert [action.worker_id for action in target.actions if action.verb == "add"] == ["prefill-30"]
