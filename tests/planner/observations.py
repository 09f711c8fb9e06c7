"""Observations for tests: a cluster in a few words."""

from typing import Any

from baton_proto.planner import (
    DECODE,
    MAJOR,
    PREFILL,
    SOURCES,
    Interval,
    LoadSample,
    Observation,
    Queue,
    Role,
    StepSample,
    WorkerView,
)

FRESH = dict.fromkeys(SOURCES, 0.0)


def workers(prefill: int, decode: int, **changes: Any) -> list[WorkerView]:
    """All ready since long ago."""
    return [
        WorkerView(f"{role}-{number}", role, "ready", -1e6, -1e6, **changes)
        for role, count in ((PREFILL, prefill), (DECODE, decode))
        for number in range(count)
    ]


def starting(worker_id: str, role: Role, since_s: float = 0.0) -> WorkerView:
    return WorkerView(worker_id, role, "starting", since_s)


def interval(rate: float = 0.0, duration_s: float = 5.0, **changes: Any) -> Interval:
    """Of requests with prompts of 1,000 tokens and answers of 200."""
    count = round(rate * duration_s)
    return Interval(duration_s, count, 1000 * count, 1e6 * count, 0, count, 200 * count, **changes)


def sampled(queue: list[float], kv_load: float, prefill: int, decode: int) -> Interval:
    return interval(samples=[LoadSample(waiting, kv_load, prefill, decode) for waiting in queue])


def observation(time_s: float, views: list[WorkerView], of: Interval | None = None, **changes: Any) -> Observation:
    given: dict[str, Any] = {"ages_s": FRESH, "queue": Queue(), "gpu_budget": 32} | changes
    return Observation(MAJOR, time_s, workers=views, interval=of or interval(), **given)


def prompt_step(tokens: float, step_ms: float, ready_for_s: float = 1e3) -> StepSample:
    return StepSample("prefill-0", ready_for_s, tokens, tokens * tokens / 2, 0, 0, step_ms)


def decode_step(sequences: float, context: float, step_ms: float, ready_for_s: float = 1e3) -> StepSample:
    return StepSample("decode-0", ready_for_s, 0, 0, sequences, context, step_ms)
