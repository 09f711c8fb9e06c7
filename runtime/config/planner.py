"""The section `planner` of serving.yaml: what the planner aims at, and what it may do for that."""

from typing import Annotated

from msgspec import Meta, Struct

from runtime.config.step_times import StepTimes
from runtime.config.types import (
    Count,
    Milliseconds,
    Positive,
    Seconds,
    Share,
    SomeWorkers,
    Text,
    Weight,
    Workers,
    in_order,
)


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Workers of each role, and GPUs of all together."""

    min_prefill: Workers = 1
    max_prefill: Workers = 64  # 0: decode workers run all prompts
    min_decode: SomeWorkers = 1
    max_decode: SomeWorkers = 64
    gpu_budget: Positive | None = None  # None: what the machines have

    def __post_init__(self) -> None:
        in_order("min_prefill", self.min_prefill, "max_prefill", self.max_prefill)
        in_order("min_decode", self.min_decode, "max_decode", self.max_decode)
        if self.gpu_budget is not None:
            in_order("min_prefill + min_decode", self.min_prefill + self.min_decode, "gpu_budget", self.gpu_budget)


class TargetsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    ttft_ms: Milliseconds = 1000.0  # from the request to its first token
    itl_ms: Milliseconds = 50.0  # mean time between the tokens of one answer
    attainment: Share = 0.99  # share of requests that shall meet each


class DelaysConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How long verbs take, as far as planning ahead goes, and how long they may take."""

    start_s: Seconds = 60.0
    start_deadline_s: Seconds = 300.0
    wake_deadline_s: Seconds = 60.0
    sleep_deadline_s: Seconds = 300.0
    flip_deadline_s: Seconds = 300.0
    drain_deadline_s: Seconds = 600.0
    retry_s: Seconds = 30.0
    retry_max_s: Seconds = 600.0

    def __post_init__(self) -> None:
        in_order("retry_s", self.retry_s, "retry_max_s", self.retry_max_s)


class SloConfig(Struct, frozen=True, forbid_unknown_fields=True):
    prefill_headroom: Weight = 0.25
    decode_headroom: Weight = 0.1
    down_margin: Weight = 0.1
    down_after_s: Seconds = 120.0
    backlog_drain_s: Seconds = 15.0
    kv_share: Share = 0.9
    profile: StepTimes = StepTimes()  # where the live fit begins; `baton profile` measures it


class ThresholdConfig(Struct, frozen=True, forbid_unknown_fields=True):
    queue_high: Weight = 5.0
    queue_low: Weight = 0.2
    kv_high: Weight = 0.9
    kv_low: Weight = 0.5
    grace_intervals: Count = 3

    def __post_init__(self) -> None:
        in_order("queue_low", self.queue_low, "queue_high", self.queue_high)
        in_order("kv_low", self.kv_low, "kv_high", self.kv_high)


class PolicySections(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row per policy: the policy NAME has its settings in `planner.NAME` and its code in planner/policy/NAME.py.

    Because the rows are keyword-only, they come after the fields of PlannerConfig, as in serving.yaml.
    """

    slo: SloConfig = SloConfig()
    threshold: ThresholdConfig = ThresholdConfig()


POLICIES = PolicySections.__struct_fields__


class PlannerConfig(PolicySections, frozen=True, forbid_unknown_fields=True):
    enabled: bool = False  # `baton up` runs a planner
    policy: Annotated[str, Meta(pattern=rf"^({'|'.join(POLICIES)})\Z", description=f"one of {', '.join(POLICIES)}")] = (
        "slo"
    )
    interval_s: Seconds = 5.0
    stale_s: Seconds = 15.0
    keep_asleep: Count = 0
    down_cooldown_s: Weight = 30.0
    reversal_s: Weight = 60.0
    reversals_per_hour: Count = 2
    journal: Text | None = None
    journal_mb: Positive = 256
    limits: LimitsConfig = LimitsConfig()
    targets: TargetsConfig = TargetsConfig()
    delays: DelaysConfig = DelaysConfig()
