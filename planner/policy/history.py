"""The history of each role: when it grew and shrank, and which starts failed. It is part of the planner's memory, and
with observation and configuration the situation that guards and ladder judge."""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from baton_proto.planner import OTHER_ROLE, ROLES, Action, Observation, Role
from planner.policy import pace
from planner.policy.observation import Counts, counts
from runtime.config.planner import PlannerConfig

LONG_AGO_S = -1e12
KEPT = 64  # reversals and failed workers, the newest


class RoleHistory(Struct, frozen=True):
    up_s: float = LONG_AGO_S  # time of the last decision that the role grows
    down_s: float = LONG_AGO_S
    reversals_s: list[float] = []  # when the role grew soon after it had shrunk
    failures: int = 0  # starts that failed since the last success
    failure: str = ""  # reason of the last failed start
    retry_s: float = LONG_AGO_S  # no start before this time
    failed: list[str] = []  # workers whose failure is counted; they count as coming no more


class Situation(Struct, frozen=True):
    observation: Observation
    config: PlannerConfig
    counts: Mapping[Role, Counts]  # without the workers that failed
    history: Mapping[str, RoleHistory]
    failed: frozenset[str]  # workers that start but are not expected to become ready


def situation(observation: Observation, config: PlannerConfig, history: Mapping[str, RoleHistory]) -> Situation:
    failed = frozenset(worker_id for role in history.values() for worker_id in role.failed)
    return Situation(observation, config, {role: counts(observation, role, failed) for role in ROLES}, history, failed)


def with_failures(histories: dict[str, RoleHistory], now: Observation, config: PlannerConfig) -> dict[str, RoleHistory]:
    """Counts starts that failed or exceeded their deadline; a worker that became ready resets the count."""
    return {role: _role_with_failures(histories.get(role, RoleHistory()), now, role, config) for role in ROLES}


def with_actions(histories: dict[str, RoleHistory], actions: list[Action], time_s: float) -> dict[str, RoleHistory]:
    """Notes when roles grew and shrank. `actions`: those for the wanted counts, without removals of failed workers."""
    new = dict(histories)
    for action in actions:
        if action.verb in ("add", "wake", "flip"):
            new[action.role] = _grown(new[action.role], time_s)
        if action.verb in ("drain", "sleep", "remove"):
            new[action.role] = replace(new[action.role], down_s=time_s)
        if action.verb == "flip":
            other = OTHER_ROLE[action.role]
            new[other] = replace(new[other], down_s=time_s)
    return new


def _grown(history: RoleHistory, time_s: float) -> RoleHistory:
    turned = time_s - history.down_s < pace.REVERSAL_S and history.down_s > history.up_s
    reversals_s = [*history.reversals_s, time_s][-KEPT:] if turned else history.reversals_s
    return replace(history, up_s=time_s, reversals_s=reversals_s)


def _role_with_failures(history: RoleHistory, now: Observation, role: Role, config: PlannerConfig) -> RoleHistory:
    deadline_s = pace.FAILED_STARTS * config.start_s
    failed = [
        (failure.worker_id, failure.reason)
        for failure in now.failures
        if failure.role == role and failure.verb in ("add", "wake")
    ]
    for worker in now.workers:
        if worker.role == role and worker.state == "starting" and now.time_s - worker.since_s > deadline_s:
            failed.append((worker.worker_id, f"{worker.worker_id} is not ready after {deadline_s:g} s"))
        elif worker.role == role and worker.state == "ready" and history.failures and worker.since_s > history.up_s:
            history = replace(history, failures=0, failure="", retry_s=LONG_AGO_S)
    for worker_id, reason in failed:
        if worker_id in history.failed:
            continue
        wait_s = min(pace.RETRY_MAX_S, pace.RETRY_S * 2.0**history.failures)
        history = replace(
            history,
            failures=history.failures + 1,
            failure=reason,
            retry_s=now.time_s + wait_s,
            failed=[*history.failed, worker_id][-KEPT:],
        )
    return history
