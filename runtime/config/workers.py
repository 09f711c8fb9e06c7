"""The section `workers` of serving.yaml: how many workers there are of each role, and what computes in them."""

from collections.abc import Mapping
from typing import Self

import msgspec
from msgspec import Struct

from baton_proto.planner import DECODE, PREFILL, ROLES, Role
from runtime.config.types import Positive, Seconds, Text, Weight, Workers

WorkerEngine = Text  # a row of worker/engines/table.py
EngineCounts = dict[WorkerEngine, Workers | None]
"""Workers of one role, by what computes in them. 0 names the engine of workers that a planner adds."""


class WorkersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    host: Text = "127.0.0.1"
    prefill: Workers | EngineCounts = 1  # a number: of `engine`
    decode: Workers | EngineCounts = 1
    engine: WorkerEngine = "baton"  # where a role names none; in a worker's process: its own
    python: Text | None = None  # the interpreter of the environment that has an engine which ours has not
    per_process: Positive | None = None  # workers that share a process; None: one, of the mock engine all
    gather_ms: Weight = 10.0  # tokens between a request's first and last leave at most so often; 0: with every step
    gather_events_ms: Weight = 20.0  # KV events leave at most so often
    weights_folders: tuple[Text, ...] = ()  # that new weights may come from; (): the folder that `model` lies in
    ready_timeout_s: Seconds = 60.0
    drain_timeout_s: Seconds = 30.0

    def by_engine(self, role: Role) -> dict[WorkerEngine, int]:
        """The engines that workers of the role have, and how many of each there are at the start. Never empty: a role
        without workers has the engine that a planner would give them."""
        counts = self.prefill if role == PREFILL else self.decode
        if isinstance(counts, int):
            return {self.engine: counts}
        given = {engine: count for engine, count in counts.items() if count is not None}
        some = {engine: count for engine, count in given.items() if count}
        return some or (given if len(given) == 1 else {self.engine: 0})

    def count(self, role: Role) -> int:
        return sum(self.by_engine(role).values())

    @property
    def total(self) -> int:
        return sum(map(self.count, ROLES))

    def next_engine(self, role: Role, living: Mapping[WorkerEngine, int]) -> WorkerEngine:
        """Of one more worker beside those that live: the role keeps its proportions (D'Hondt's method)."""
        counts = self.by_engine(role)
        return max(counts, key=lambda engine: counts[engine] / (living.get(engine, 0) + 1))

    def of(self, engine: WorkerEngine) -> Self:
        """The section for the process of a worker with this engine. The numbers of workers keep their meaning,
        also where a role has none."""
        return msgspec.structs.replace(
            self, engine=engine, prefill=self.by_engine(PREFILL), decode=self.by_engine(DECODE)
        )
