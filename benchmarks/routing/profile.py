"""Our half's time in one case, by cProfile; calls of C code are listed with the lines that make them."""

import cProfile
import pstats
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.routing.baton_half import BatonHalf

PROFILE_TOKENS = (1024, 8192, 131072)
LINES = 30


def profile(case: str, folder: Path, num_workers: int, num_requests: int) -> None:
    """Prints a table per prompt length (or one for the stream), sorted by own time."""
    half = BatonHalf()
    where = str(folder)
    match case:
        case "hash":
            for tokens in PROFILE_TOKENS:
                _run(f"{tokens} tokens", partial(half.hash, where, tokens, 0.5))
        case "find":
            half.share_prefix(where, 64)
            for tokens in PROFILE_TOKENS:
                _run(f"{tokens} tokens, 64 workers", partial(half.find, tokens, True, 0.5))
        case "stream":
            half.open_stream(where, num_workers)
            _run(f"{num_requests} requests, {num_workers} workers", partial(half.run_stream, 0, num_requests))
        case "decision":
            half.open_router(where, 8)
            for tokens in PROFILE_TOKENS:
                _run(f"{tokens} tokens, 8 workers", partial(half.decide, tokens, 0.5))
        case "memory":
            _run("stream", partial(half.memory, where, "stream", 0, 1))


def _run(title: str, work: Callable[[], object]) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    work()
    profiler.disable()
    print(f"=== {title}")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(LINES)
