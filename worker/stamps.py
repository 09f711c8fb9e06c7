"""Times on a worker's clock, time.monotonic(), as messages carry them: relative to the moment of sending, or to that at
which the worker got the prompt."""

import time
from math import inf

from baton_proto.timeline import PromptChunk, micros
from engine.sequences.sequence import Sequence


def chunks_of(sequence: Sequence, since_s: float) -> list[PromptChunk]:
    """`since_s`: on time.monotonic()."""
    return [
        PromptChunk(micros(start_s - since_s), micros(end_s - start_s), num_tokens)
        for start_s, end_s, num_tokens in sequence.chunks
    ]


def due_at(due_ms: int | None) -> float:
    """When a first token is due that a message calls due in so many ms; infinite: at no time."""
    return inf if due_ms is None else time.monotonic() + due_ms / 1e3


def due_in_ms(due_s: float) -> int | None:
    """The reverse. What is late is due now."""
    return None if due_s == inf else max(0, round((due_s - time.monotonic()) * 1e3))
