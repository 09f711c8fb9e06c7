"""What a benchmark has measured, per request and in all."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct


@dataclass(slots=True)
class Timing:
    """One request. Times are seconds on one clock."""

    sent_s: float
    tokens_s: list[float] = field(default_factory=list)  # when each event with new text came
    ended_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    problem: str = ""  # why there is no whole answer


class Spread(Struct, frozen=True):
    """The spread of a latency, in ms."""

    mean: float
    p50: float
    p90: float
    p99: float


class Point(Struct, frozen=True, omit_defaults=True):
    """One load. Only whole answers count."""

    load: str  # "at once", "concurrency 8", "4 per s", "trace"
    requests: int
    seconds: float  # from the first request's start to the last one's end
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    events_per_token: float  # 1.0: each token came on its own, so that ITL is that of tokens
    ttft_ms: Spread
    itl_ms: Spread
    request_ms: Spread
    failed: int = 0
    problem: str = ""  # of the first that failed


def summed(load: str, timings: Sequence[Timing]) -> Point:
    """Sums up timings, at least one of which has no problem."""
    whole = [timing for timing in timings if not timing.problem]
    seconds = max(timing.ended_s for timing in whole) - min(timing.sent_s for timing in whole)
    prompt_tokens = sum(timing.prompt_tokens for timing in whole)
    output_tokens = sum(timing.output_tokens for timing in whole)
    gaps = [gap for timing in whole for gap in np.diff(timing.tokens_s)]
    return Point(
        load=load,
        requests=len(whole),
        seconds=round(seconds, 4),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=round(len(whole) / seconds, 3),
        output_tokens_per_s=round(output_tokens / seconds, 2),
        total_tokens_per_s=round((prompt_tokens + output_tokens) / seconds, 2),
        events_per_token=round(sum(len(timing.tokens_s) for timing in whole) / max(1, output_tokens), 3),
        ttft_ms=_spread([timing.tokens_s[0] - timing.sent_s for timing in whole if timing.tokens_s]),
        itl_ms=_spread(gaps),
        request_ms=_spread([timing.ended_s - timing.sent_s for timing in whole]),
        failed=len(timings) - len(whole),
        problem=next((timing.problem for timing in timings if timing.problem), ""),
    )


def _spread(seconds: Sequence[float]) -> Spread:
    if not seconds:
        return Spread(0.0, 0.0, 0.0, 0.0)
    values = np.array(seconds) * 1e3
    return Spread(*(round(float(value), 3) for value in (values.mean(), *np.percentile(values, (50, 90, 99)))))
