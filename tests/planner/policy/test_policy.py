"""A policy is one row in runtime/config/planner.py and one file in planner/policy/: nothing else knows its name."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec import Struct

from baton_proto.planner import MAJOR, Observation
from planner.journal import Decided, Journal, Started, read_journal
from planner.planner import Planner
from planner.policy.guards import LIMITS
from planner.policy.policy import Policy, make_policy
from planner.policy.wanted import Wanted
from planner.replay import replay, summary
from runtime.config.planner import POLICIES, LimitsConfig, PlannerConfig
from tests.planner.observations import observation, workers


class ToyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    step: int = 1


class WithToy(PlannerConfig, frozen=True, forbid_unknown_fields=True):
    """The row of the recipe, without touching the file."""

    toy: ToyConfig = ToyConfig()


class ToyMemory(Struct, frozen=True):
    prefill: int = 1


class ToyPolicy(Policy[ToyMemory]):
    """Wants `step` prefill workers more each time."""

    name = "toy"
    memory = ToyMemory
    guards = LIMITS

    def initial(self) -> ToyMemory:
        return ToyMemory()

    def decide(self, observation: Observation, memory: ToyMemory) -> tuple[Wanted, ToyMemory]:
        config: Any = self._config
        prefill = memory.prefill + config.toy.step
        return Wanted(prefill, 1, ("toys want more",)), ToyMemory(prefill)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> PlannerConfig:
    module = ModuleType("planner.policy.toy")
    module.POLICY = ToyPolicy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return WithToy(policy="toy", toy=ToyConfig(step=2), limits=LimitsConfig(max_prefill=6))


@pytest.mark.parametrize("name", POLICIES)
def test_each_section_of_the_configuration_has_its_policy(name: str) -> None:
    policy = make_policy(PlannerConfig(policy=name))
    assert policy.name == name
    assert isinstance(policy.initial(), policy.memory)
    assert policy.guards[-len(LIMITS) :] == LIMITS, "limits, budget and counts set by hand bind every policy"


def test_a_policy_that_is_registered_decides_is_recorded_and_replayed(config: PlannerConfig, tmp_path: Path) -> None:
    journal, planner = Journal(tmp_path / "plan.jsonl", 10**9), Planner(config)
    journal.write(Started(0.0, MAJOR, "toy"))
    for number in range(4):
        seen = observation(5.0 * number, workers(2, 1))
        journal.write(Decided(seen.time_s, seen, planner.decide(seen), 1.0))
    journal.close()
    replayed = replay(read_journal(tmp_path / "plan.jsonl"), config)
    assert [decision.recorded.prefill for decision in replayed.decisions] == [3, 5, 6, 6]  # 6: its guards
    assert not any(decision.differ for decision in replayed.decisions)
    assert summary([decision.other for decision in replayed.decisions]).policy == "toy"


def test_a_registered_policys_memory_outlives_its_planner(config: PlannerConfig) -> None:
    first, second = Planner(config), Planner(config)
    first.decide(observation(0.0, workers(2, 1)))
    second.restore(first.saved())
    assert second.decide(observation(5.0, workers(2, 1))).prefill == 5
