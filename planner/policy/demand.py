"""Running means of the requests' lengths and hit rate, from the intervals' totals."""

import math

from msgspec import Struct

from baton_proto.planner import DECODE, Interval, Observation
from planner.policy.observation import of_role
from planner.policy.sizing import Lengths

MEMORY_S = 300.0  # time constant


class Sums(Struct, frozen=True):
    """Sums over past intervals, each interval weighted by exp(-age / MEMORY_S)."""

    requests: float = 0.0
    input_tokens: float = 0.0
    input_tokens_squared: float = 0.0
    cached_tokens: float = 0.0
    local_prefills: float = 0.0
    finished: float = 0.0
    output_tokens: float = 0.0
    running: float = 0.0
    context_tokens: float = 0.0


COUNTED = {*Sums.__struct_fields__} & {*Interval.__struct_fields__}


def counted(sums: Sums, observation: Observation) -> Sums:
    """The sums with one more interval."""
    interval = observation.interval
    keep = math.exp(-interval.duration_s / MEMORY_S)
    decoders = of_role(observation, DECODE)
    new = {name: getattr(interval, name) for name in COUNTED} | {
        "requests": interval.arrivals,
        "running": sum(worker.running for worker in decoders),
        "context_tokens": sum(worker.context_tokens for worker in decoders),
    }
    return Sums(**{name: keep * getattr(sums, name) + number for name, number in new.items()})


def lengths(sums: Sums) -> Lengths | None:
    """The mean lengths of requests; None before the first answer has ended."""
    if sums.requests < 1e-6 or sums.finished < 1e-6:
        return None
    prompt, output = sums.input_tokens / sums.requests, sums.output_tokens / sums.finished
    return Lengths(
        input_tokens=prompt,
        input_tokens_squared=sums.input_tokens_squared / sums.requests,
        output_tokens=output,
        hit_rate=min(0.99, sums.cached_tokens / max(1.0, sums.input_tokens)),
        local_share=min(1.0, sums.local_prefills / sums.requests),
        context_tokens=sums.context_tokens / sums.running if sums.running > 1e-6 else prompt + output,
    )
