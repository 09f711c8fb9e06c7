"""What a router tells once a second on `baton.<namespace>.router.<router_id>`, over core NATS: its queue, and totals.

Totals rise from the router's start, so that a message that is lost is made good by the next one. A choice counts as a
request of its own (`n: 3` is three), since each is a prompt and an answer to the workers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from baton_proto.decoding import Count, Name, Rows, Small, versioned
from baton_proto.token_counts import TokenCounts

MAJOR = 1

BUCKETS = 128  # of the histograms: bucket i holds latencies from RATIO**i to RATIO**(i + 1) ms, up to 200 s
RATIO = 1.1


class RouterQueue(Struct, frozen=True):
    """Requests without workers."""

    waiting: Small = 0
    prompt_tokens: Count = 0  # of these, cached ones too
    oldest_s: Annotated[float, Meta(ge=0)] = 0.0  # how long the first one waits


class RouterTotals(TokenCounts, array_like=False):
    """A router counts in one of these, and sends it. Its TokenCounts: of the started requests' prompts, and of the
    finished answers."""

    arrivals: Count = 0
    input_tokens: Count = 0  # of the prompts of all arrivals
    input_tokens_squared: Annotated[float, Meta(ge=0)] = 0.0  # sum of squares
    started: Count = 0  # requests whose first token has come
    local_prefills: Count = 0  # of the started: those whose prompt the decode worker ran, with prefill workers there
    finished: Count = 0  # answers that ended after a token or more, for whatever reason
    ttft: Annotated[list[Count], Rows] = field(default_factory=list)  # BUCKETS counts, from arrival to the first token
    # Of answers of two tokens and more: mean time between tokens.
    itl: Annotated[list[Count], Rows] = field(default_factory=list)


class RouterReport(Struct, frozen=True):
    version: Count
    router_id: Name
    incarnation: Count
    uptime_s: Annotated[float, Meta(ge=0)]  # when this was counted
    queue: RouterQueue
    totals: RouterTotals
    leaving: bool = False  # the router's last word
    metrics_address: Name = ""  # HOST:PORT of the Prometheus endpoint


def bucket_of(milliseconds: float) -> int:
    return min(BUCKETS - 1, int(math.log(max(1.0, milliseconds)) / math.log(RATIO)))


def percentile_ms(counts: Sequence[int], share: float) -> float | None:
    """The middle of the bucket that holds it; None when nothing was counted."""
    total, seen = sum(counts), 0
    for bucket, count in enumerate(counts):
        seen += count
        if count and seen >= share * total:
            return float(RATIO ** (bucket + 0.5))
    return None


encode_router_report: Callable[[RouterReport], bytes] = msgspec.msgpack.Encoder().encode
decode_router_report = versioned(RouterReport, "router report", MAJOR)
