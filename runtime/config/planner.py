"""The section `planner` of serving.yaml: what the planner aims at, and what it may do for that."""

from typing import Final, Literal, Self, get_args

import msgspec
from msgspec import Struct

from runtime.config.types import Count, Milliseconds, Positive, Seconds, Share, SomeWorkers, Text, Workers, in_order

PolicyName = Literal["slo", "threshold"]  # each a module of planner/policy/
POLICIES: tuple[str, ...] = get_args(PolicyName)
APART: Final = 0.9


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    # Workers of each role, at least (min_prefill, min_decode) and at most (max_prefill, max_decode). max_prefill 0: the
    # decode workers run all prompts, and are sized for that.
    min_prefill: Workers = 1
    max_prefill: Workers = 64
    min_decode: SomeWorkers = 1
    max_decode: SomeWorkers = 64
    # GPUs that all workers may hold together, those that start, drain or sleep included; of `models`, those that are
    # awake. null: as many as there are. On a CPU a worker counts as one GPU, and there are as many as cores; workers of
    # the mock engine need none of either.
    gpu_budget: Positive | None = None

    def __post_init__(self) -> None:
        in_order("min_prefill", self.min_prefill, "max_prefill", self.max_prefill)
        in_order("min_decode", self.min_decode, "max_decode", self.max_decode)
        if self.gpu_budget is not None:
            in_order("min_prefill + min_decode", self.min_prefill + self.min_decode, "gpu_budget", self.gpu_budget)


class TargetsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    # Milliseconds from a request's arrival to its first token.
    ttft_ms: Milliseconds = 1000.0
    # Milliseconds between two tokens of an answer, on average. With a planner or without, a step of our own engine
    # beside answers takes as many prompt tokens as fit into this time (into 0.9 of it where prompts have workers of
    # their own), and into a longer one while the prompts that wait take longer than ttft_ms.
    itl_ms: Milliseconds = 50.0
    # Share of the requests that shall meet them.
    attainment: Share = 0.99

    def of_steps(self, *, apart: bool) -> Self:
        """What steps beside answers aim at. `apart`: prompts have workers of their own. Then answers keep a stricter
        pace, at no cost: as simulated, times between tokens have a P99 of 0.89 to 0.94, and first tokens come when they
        came."""
        return msgspec.structs.replace(self, itl_ms=APART * self.itl_ms) if apart else self


class PlannerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    # Whether `baton up` runs it (or --planner, --no-planner). workers.prefill and workers.decode are then what it
    # begins with.
    enabled: bool = False
    # slo: sizes both roles for the latency targets. threshold: one worker more or less by queue length and KV load.
    policy: PolicyName = "slo"
    # Seconds between two decisions.
    interval_s: Seconds = 5.0
    # Seconds from the decision to start a worker until it serves: the demand is forecast as far ahead. A start that
    # takes five times as long has failed. On Ray a worker waits twice as long for a node with room for it.
    start_s: Seconds = 60.0
    # Of the workers that are not needed, so many are put to sleep instead of ended. Sleepers keep their GPUs, and wake
    # in seconds.
    keep_asleep: Count = 0
    # File in which each decision is a line (`baton plan replay` reads it). null: none. Of 256 MB it is renamed to
    # NAME.1, over the last one of that name.
    journal: Text | None = None

    limits: LimitsConfig = LimitsConfig()

    # What users shall see.
    targets: TargetsConfig = TargetsConfig()
