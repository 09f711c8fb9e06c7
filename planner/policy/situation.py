"""The input of guards and ladder: the observation, the configuration, and the history of each role."""

from collections.abc import Mapping

from msgspec import Struct

from baton_proto.planner import ROLES, Observation, Role
from planner.policy.history import RoleHistory
from planner.policy.observation import Counts, counts
from runtime.config.planner import PlannerConfig


class Situation(Struct, frozen=True):
    observation: Observation
    config: PlannerConfig
    counts: Mapping[Role, Counts]  # without the workers that failed
    history: Mapping[str, RoleHistory]
    failed: frozenset[str]  # workers that start but are not expected to become ready


def situation(observation: Observation, config: PlannerConfig, history: Mapping[str, RoleHistory]) -> Situation:
    failed = frozenset(worker_id for role in history.values() for worker_id in role.failed)
    return Situation(observation, config, {role: counts(observation, role, failed) for role in ROLES}, history, failed)
