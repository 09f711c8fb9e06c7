"""The planner turns an observation into a target: the policy wants counts, guards limit them, the ladder turns them
into actions.

A planner has no clock and does no I/O, so that the live loop, the simulation and a replay run the same code. Its
memory can be saved and restored.
"""

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from baton_proto.decoding import decoder
from baton_proto.planner import DECODE, MAJOR, PREFILL, ROLES, Action, Observation, Target
from planner.policy import pace
from planner.policy.guards import guarded, within_budget
from planner.policy.history import RoleHistory, situation, with_actions, with_failures
from planner.policy.ladder import actions_for, given_up
from planner.policy.observation import counts, gpus_held, gpus_of_role, stale_sources
from planner.policy.policy import make_policy
from planner.policy.shares import Claim
from planner.policy.wanted import Wanted
from runtime.config.planner import PlannerConfig
from runtime.config.step_times import USUAL, StepTimes
from runtime.errors import ConfigError


class Saved(Struct, frozen=True):
    """The planner's memory as NATS stores it."""

    version: int
    policy: str
    policy_memory: msgspec.Raw
    history: dict[str, RoleHistory]
    next_number: int


class Planner:
    """`model`: as the ids of its workers have it, where several models are served."""

    def __init__(self, config: PlannerConfig, step_times: StepTimes = USUAL, model: str = "") -> None:
        self._config = config
        self._policy = make_policy(config, step_times)
        self._policy_memory = self._policy.initial()
        self._history: dict[str, RoleHistory] = {role: RoleHistory() for role in ROLES}
        self._next_number = 1  # in the id of the next worker to add
        self._model = model
        self.claim = Claim(0)  # after the last decision

    def decide(self, observation: Observation) -> Target:
        """The target for this interval; it changes nothing (`frozen`) when a source was silent for too long."""
        if stale := stale_sources(observation):
            self.claim = replace(self.claim, holds=gpus_held(observation))
            return self._frozen(observation, stale)
        self._history = with_failures(self._history, observation, self._config)
        now = situation(observation, self._config, self._history)
        wanted, self._policy_memory = self._policy.decide(observation, self._policy_memory)
        asked = guarded(wanted, now, tuple(one for one in self._policy.guards if one is not within_budget))
        wanted = guarded(wanted, now, self._policy.guards)
        self._skip_numbers_in_use(observation)
        actions = actions_for(wanted, now, self._next_number, self._model)
        self._next_number += sum(action.verb == "add" for action in actions)
        self._history = with_actions(self._history, actions, observation.time_s)
        self.claim = self._claimed(observation, asked, actions)
        return self._target(observation, wanted, given_up(now) + actions)

    def saved(self) -> bytes:
        memory = msgspec.Raw(msgspec.json.encode(self._policy_memory))
        return msgspec.json.encode(Saved(MAJOR, self._policy.name, memory, self._history, self._next_number))

    def restore(self, data: bytes) -> None:
        """Takes over the memory that `saved` returned; the memory of another policy is dropped. Raises ConfigError when
        `data` is malformed or of another version."""
        try:
            saved = decoder(Saved, json=True)(data)
            if saved.version != MAJOR:
                raise ConfigError("planner state", f"has version {saved.version}; this build reads {MAJOR}")
            if saved.policy == self._policy.name:
                self._policy_memory = decoder(self._policy.memory, json=True)(saved.policy_memory)
        except msgspec.DecodeError as error:
            raise ConfigError("planner state", str(error)) from error
        self._history = {role: saved.history.get(role, RoleHistory()) for role in ROLES}
        self._next_number = saved.next_number

    def _claimed(self, observation: Observation, asked: Wanted, actions: list[Action]) -> Claim:
        """`asked`: what is wanted whatever other models hold."""
        gpus, limits = {role: gpus_of_role(observation, role) for role in ROLES}, self._config.limits
        least = {PREFILL: limits.min_prefill, DECODE: limits.min_decode} | observation.holds.counts()
        holds = gpus_held(observation) + sum(gpus[action.role] for action in actions if action.verb == "add")
        wants = sum(asked.of(role) * gpus[role] for role in ROLES)
        return Claim(holds, wants, sum(least[role] * gpus[role] for role in ROLES))

    def _skip_numbers_in_use(self, observation: Observation) -> None:
        for worker in observation.workers:
            number = worker.worker_id.rpartition("-")[2]
            if number.isdigit():
                self._next_number = max(self._next_number, int(number) + 1)

    def _frozen(self, observation: Observation, stale: list[str]) -> Target:
        limit = f"{pace.STALE_S:g} s"
        reason = f"nothing was heard from {' and '.join(stale)} for more than {limit}: all stays as it is"
        prefill, decode = (counts(observation, role).have for role in ROLES)
        return Target(MAJOR, observation.time_s, self._policy.name, prefill, decode, [], [reason], frozen=True)

    def _target(self, observation: Observation, wanted: Wanted, actions: list[Action]) -> Target:
        return Target(
            MAJOR,
            observation.time_s,
            self._policy.name,
            wanted.prefill,
            wanted.decode,
            actions,
            list(wanted.reasons),
            figures=wanted.figures,
        )
