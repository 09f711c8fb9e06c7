"""The section `workers` of serving.yaml: how many workers there are of each role, and what computes in them."""

from collections.abc import Mapping
from typing import Self

import msgspec
from msgspec import Struct

from baton_proto.planner import DECODE, PREFILL, ROLES, Role
from runtime.address import is_host, is_wildcard
from runtime.config.types import Positive, Seconds, Text, Workers

WorkerEngine = Text  # a row of worker/engines/table.py
EngineCounts = dict[WorkerEngine, Workers | None]
"""Workers of one role, by what computes in them. 0 names the engine of workers that a planner adds."""


class WorkersConfig(Struct, frozen=True, forbid_unknown_fields=True):
    # Address that the workers listen on.
    host: Text = "127.0.0.1"
    # Host that routers and other workers connect to, a name or an address of this machine. null: `host`, or where that
    # is 0.0.0.0 or ::, this machine's address on its way to NATS.
    announce: Text | None = None
    # How many of each role are started. Without prefill workers the decode workers run the prompts themselves. A number
    # is of workers with `engine`; {baton: 1, vllm: 2} names engines, and {vllm: 0} that of workers that a planner adds.
    # Prefill workers send KV to decode workers with the same engine alone.
    prefill: Workers | EngineCounts = 1
    decode: Workers | EngineCounts = 1
    # What workers compute with where their role names no engine: baton, or vllm (docs/operating.md, "Workers with
    # vLLM").
    engine: WorkerEngine = "baton"
    # The interpreter of the environment that has an engine which ours has not: with vllm .venv-vllm/bin/python after
    # `make vllm-env`.
    python: Text | None = None
    # How many workers share one process. null: each has its own, but of the mock engine all share one. With a planner,
    # and those of a model that sleeps until it is asked for, each has its own.
    per_process: Positive | None = None
    # Folders that new weights of running workers may come from, or from below: ["/models"]. []: the folder that `model`
    # lies in.
    weights_folders: tuple[Text, ...] = ()
    # Seconds until a process that was started must be ready.
    ready_timeout_s: Seconds = 60.0
    # Seconds that a process which is told to stop has for the requests in flight.
    drain_timeout_s: Seconds = 30.0

    def __post_init__(self) -> None:
        host = self.announce
        if host is not None and (is_wildcard(host) or not is_host(host)):
            raise ValueError(f"announce: {host!r} is no host that others can connect to: a name or an address, no port")

    @property
    def reached_at(self) -> str:
        """The host that others connect to, once a process has filled it in (runtime/processes/reached_at.py)."""
        return self.announce or self.host

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
        """The engine of one more worker beside those that live. The role keeps its proportions (D'Hondt's method)."""
        counts = self.by_engine(role)
        return max(counts, key=lambda engine: counts[engine] / (living.get(engine, 0) + 1))

    def of(self, engine: WorkerEngine) -> Self:
        """The section for the process of a worker with this engine. The numbers of workers keep their meaning,
        also where a role has none."""
        return msgspec.structs.replace(
            self, engine=engine, prefill=self.by_engine(PREFILL), decode=self.by_engine(DECODE)
        )
