"""The base class of policies, and how a policy is found by its name.

A policy takes an observation and its memory, and returns the wanted counts and its new memory. It has no clock and does
no I/O. Its memory is a Struct that goes to JSON and back, so that a restarted planner continues with it.
"""

from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import Struct

from baton_proto.planner import Observation
from planner.policy.guards import Guard
from planner.policy.wanted import Wanted
from runtime.config.planner import PlannerConfig
from runtime.config.step_times import USUAL, StepTimes

Memory = TypeVar("Memory", bound=Struct)


class Policy(Generic[Memory]):
    name: ClassVar[str]  # in decisions and journals; a name of runtime/config/planner.py
    memory: ClassVar[type[Struct]]  # the type that `initial` and `decide` return
    guards: ClassVar[tuple[Guard, ...]]  # applied to each answer, in this order

    def __init__(self, config: PlannerConfig, step_times: StepTimes = USUAL) -> None:
        """`step_times`: where a policy that learns them begins."""
        self._config, self._step_times = config, step_times

    def initial(self) -> Memory:
        """The memory before the first observation."""
        raise NotImplementedError

    def decide(self, observation: Observation, memory: Memory) -> tuple[Wanted, Memory]:
        raise NotImplementedError


def make_policy(config: PlannerConfig, step_times: StepTimes = USUAL) -> Policy[Any]:
    """The policy that the configuration names: the class POLICY of planner/policy/NAME.py."""
    made: Policy[Any] = import_module(f"planner.policy.{config.policy}").POLICY(config, step_times)
    return made
