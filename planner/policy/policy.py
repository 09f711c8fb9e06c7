"""What a policy is: observation and memory in, wanted counts and new memory out. No clock, no I/O.

A policy remembers nothing by itself. Its memory is a Struct that goes to JSON and back, so that a planner that was
restarted goes on where the last one was.
"""

from typing import Protocol, TypeVar

from baton_proto.planner import Observation
from planner.policy.wanted import Wanted

Memory = TypeVar("Memory")


class Policy(Protocol[Memory]):
    name: str

    def initial(self) -> Memory: ...

    def decide(self, observation: Observation, memory: Memory) -> tuple[Wanted, Memory]: ...
