"""What a worker tells of a prompt's chunks: their times since the worker got the prompt."""

from baton_proto.timeline import PromptChunk, micros
from engine.core.sequence import Sequence


def chunks_of(sequence: Sequence, since_s: float) -> list[PromptChunk]:
    """`since_s`: on time.monotonic()."""
    return [
        PromptChunk(micros(start_s - since_s), micros(end_s - start_s), num_tokens)
        for start_s, end_s, num_tokens in sequence.chunks
    ]
