"""The compared cases and their goals: one function per case, which returns rows of the table."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.routing.comparison import AnswersDifferError, Comparison, Goal, Row, percentile
from benchmarks.routing.half import Half

LENGTHS = {"1k": 1024, "8k": 8192, "32k": 32768, "128k": 131072}
WORKERS = (8, 64, 256)
DECISION_WORKERS = 8  # each of the peer's workers is a process
DECISION_AT_MOST_US = {"1k": 60.0, "8k": 90.0, "128k": 600.0}
PEER_LOOPS = ("uvloop", "asyncio")
STREAM_PASSES = 5
STREAM_CHUNK = 100  # requests of one half before the other half's turn
MEMORY_WORKERS = 3

StartHalf = Callable[[], Half]


def hashing(comparison: Comparison) -> Iterator[Row]:
    for name, tokens in LENGTHS.items():
        goal = Goal(ratio=5 if tokens >= 8192 else 1)
        folder = str(comparison.folder)
        yield comparison.latency("hash", f"{name} tokens", goal, "hash", folder=folder, num_tokens=tokens)


def find(comparison: Comparison) -> Iterator[Row]:
    for workers in WORKERS:
        comparison.both("share_prefix", folder=str(comparison.folder), num_workers=workers)
        for case, named in (("find", False), ("find + scores", True)):
            for name, tokens in LENGTHS.items():
                goal = Goal(ratio=5 if tokens >= 8192 else 1)
                what = f"{name} tokens, {workers} workers"
                yield comparison.latency(case, what, goal, "find", num_tokens=tokens, named=named)


def stream(comparison: Comparison, num_workers: int, num_requests: int) -> Iterator[Row]:
    """The halves take turns after each chunk of requests, so that both meet the same noise with trees of the same age.
    The best of several passes counts for each request: its cost when no other process disturbs it."""
    rows: dict[Half, list[list[float]]] = {comparison.ours: [], comparison.theirs: []}
    for _ in range(STREAM_PASSES):
        comparison.both("open_stream", folder=str(comparison.folder), num_workers=num_workers)
        again: dict[Half, list[list[float]]] = {half: [] for half in rows}
        for number, first in enumerate(range(0, num_requests, STREAM_CHUNK)):
            last = min(first + STREAM_CHUNK, num_requests)
            halves = list(rows) if number % 2 else list(rows)[::-1]
            for half in halves:
                again[half] += half.call("run_stream", first=first, last=last)
        for half in rows:
            rows[half] = _best(rows[half], again[half]) if rows[half] else again[half]
    ours, theirs = rows.values()
    what = f"{num_workers} workers, {num_requests} requests"
    for request, (mine, peer) in enumerate(zip(ours, theirs, strict=True)):
        if mine[4] != peer[4]:
            raise AnswersDifferError(f"stream, {what}, request {request}", mine[4], peer[4])
    yield _stream_row(
        "stream: find, p50", what, ours, theirs, Goal(ratio=1), lambda of: statistics.median(_column(of, 0))
    )
    yield _stream_row("stream: find, p99", what, ours, theirs, None, lambda of: percentile(_column(of, 0), 99))
    yield _stream_row(
        "stream: find, mean", what, ours, theirs, Goal(ratio=1), lambda of: statistics.mean(_column(of, 0))
    )
    yield _stream_row("stream: apply an event", what, ours, theirs, Goal(ratio=2), _apply_us_per_event)
    yield _stream_row("stream: apply 1000 blocks", what, ours, theirs, None, _apply_us_per_1000_blocks)
    yield _stream_row("stream: find + apply, a request", what, ours, theirs, Goal(ratio=3.9), _us_per_request)


def decision(comparison: Comparison, start_peer: StartHalf) -> Iterator[Row]:
    """Every worker holds the whole prompt. Because the peer's router is a coroutine, its event loop matters: both loops
    are measured, each in a fresh process. Only our half is measured with both roles, and with more workers."""
    folder = str(comparison.folder)
    comparison.ours.call("open_router", folder=folder, num_workers=DECISION_WORKERS)
    for loop in PEER_LOOPS:
        with start_peer() as theirs:
            theirs.call("open_router", folder=folder, num_workers=DECISION_WORKERS, loop=loop)
            pair = replace(comparison, theirs=theirs)
            for name, tokens in LENGTHS.items():
                goal = Goal(ratio=2.5, at_most=DECISION_AT_MOST_US.get(name))
                what = f"{name} tokens, {DECISION_WORKERS} workers"
                yield pair.latency(f"decision (KvRouter on {loop})", what, goal, "decide", num_tokens=tokens)
            theirs.call("close_router")
    for workers, shipped in ((8, True), (64, False), (256, False)):
        comparison.ours.call("open_router", folder=folder, num_workers=workers, shipped=shipped)
        for name, tokens in LENGTHS.items():
            fleet = f"{workers}P + {workers}D" if shipped else f"{workers} workers"
            alone = Goal(at_most=DECISION_AT_MOST_US[name]) if name in DECISION_AT_MOST_US else None
            yield comparison.latency_alone("decision", f"{name} tokens, {fleet}", alone, "decide", num_tokens=tokens)


def memory(folder: Path, num_blocks: int, starts: tuple[StartHalf, StartHalf]) -> Iterator[Row]:
    for shape in ("chain", "stream"):
        grown: list[list[int]] = []
        for start in starts:
            with start() as half:  # in a fresh process
                arguments = {"folder": str(folder), "shape": shape, "num_blocks": num_blocks}
                grown.append(half.call("memory", **arguments, num_workers=MEMORY_WORKERS))
        first = [workers[0] / num_blocks for workers in grown]
        further = [(workers[-1] - workers[0]) / (MEMORY_WORKERS - 1) / num_blocks for workers in grown]
        for what, goal, (ours, theirs) in (("first worker", 80, first), ("each further worker", 12, further)):
            ratio = theirs / ours if ours > 0 else None
            yield Row(
                "memory",
                f"{shape} of {num_blocks:,} blocks, {what}",
                "bytes/block",
                ours,
                theirs,
                ratio,
                Goal(at_most=goal),
            )
    with starts[0]() as half:
        ours = half.call("memory_of_homes", num_blocks=num_blocks) / num_blocks
    what = f"{num_blocks:,} blocks in prefixes of 32, in three homes"
    yield Row("memory", what, "bytes/block", ours, None, None, Goal(at_most=81))


def _best(rows: list[list[float]], again: list[list[float]]) -> list[list[float]]:
    """The shorter times of two passes; the rest of a row is the same in both."""
    return [[*map(min, row[:2], more[:2]), *more[2:]] for row, more in zip(rows, again, strict=True)]


def _column(rows: list[list[float]], index: int) -> list[float]:
    return [row[index] for row in rows]


def _stream_row(
    case: str,
    what: str,
    ours: list[list[float]],
    theirs: list[list[float]],
    goal: Goal | None,
    measure: Callable[[list[list[float]]], float],
) -> Row:
    mine, peer = measure(ours), measure(theirs)
    return Row(case, what, "us", mine, peer, peer / mine, goal)


def _apply_us_per_event(rows: list[list[float]]) -> float:
    return sum(_column(rows, 1)) / sum(_column(rows, 2))


def _apply_us_per_1000_blocks(rows: list[list[float]]) -> float:
    return 1000 * sum(_column(rows, 1)) / sum(_column(rows, 3))


def _us_per_request(rows: list[list[float]]) -> float:
    return (sum(_column(rows, 0)) + sum(_column(rows, 1))) / len(rows)
