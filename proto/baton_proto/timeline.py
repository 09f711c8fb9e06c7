"""When a request's first token passed what, in microseconds since a moment that the writer of the message knows.

Invariant: no reading of a clock crosses a process, so the clocks of two hosts are never compared.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from baton_proto.decoding import Count, Small

MAX_CHUNKS: Final = 32  # of a prompt; the last one sums up those that follow
MAX_RANKS: Final = 8  # of a prefill worker


class PromptChunk(Struct, frozen=True, array_like=True, gc=False):
    """Prompt tokens that one engine step computed."""

    start_us: Count
    took_us: Count
    tokens: Small


class PushedChunk(Struct, frozen=True, array_like=True, gc=False):
    """KV blocks of one prompt chunk, from the first byte of the first layer to the last one of the last."""

    start_us: Count
    took_us: Count
    busy_us: Count  # part of took_us in which bytes were written, and not waited for
    kv_bytes: Count
    layers: Small
    rank: Small = 0  # of the prefill worker


Chunks = Annotated[list[PromptChunk], Meta(max_length=MAX_CHUNKS)]
Pushes = Annotated[list[PushedChunk], Meta(max_length=MAX_CHUNKS)]  # of one rank
AllPushes = Annotated[list[PushedChunk], Meta(max_length=MAX_CHUNKS * MAX_RANKS)]


class Timeline(Struct, frozen=True, omit_defaults=True):
    """Since the decode worker got the request; `chunks` and `pushes` since the prefill worker got the prompt, if one
    did."""

    first_us: Count  # the first token left
    granted_us: Count = (
        0  # the prompt had its blocks; this and the next two are 0 where the decode worker ran the prompt
    )
    arrived_us: Count = 0  # the prompt's KV had arrived
    prefill_us: Count = 0  # from the prompt's arrival at the prefill worker to the COMMIT
    chunks: Chunks = []
    pushes: AllPushes = []


def micros(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
