"""A request's timeline: a row per hop of each attempt, parents before children, from the stamps that router and workers
have taken. The page and traces show the same rows.

The router knows when it sent a request and when the first token came; a worker says how long each thing took in
between.
Invariant: a worker's stamps lie in the middle of what the two known moments leave open, so they are wrong by at most
`off_by_ms`, whatever the hosts' clocks say.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec import Struct

from baton_proto.timeline import Timeline
from router.counters.recent import Attempt, RecentRequest, Service


class Hop(Struct, frozen=True):
    """Times are the router's, monotonic."""

    name: str
    depth: int  # 0: an attempt; a hop of depth d belongs to the last one before it of depth d - 1
    choice: int
    attempt: int
    began_s: float
    ended_s: float
    worker: str = ""
    tokens: int = 0
    kv_bytes: int = 0
    layers: int = 0
    gb_per_s: float = 0.0  # while bytes were written
    transport: str = ""
    problem: str = ""
    off_by_ms: float = 0.0


def hops(request: RecentRequest, now_s: float) -> list[Hop]:
    """`now_s`: the end of what is still going on."""
    return [
        hop for choice in request.choices for attempt in choice.tried for hop in _Rows(choice, attempt, now_s).rows()
    ]


class _Rows:
    def __init__(self, choice: Service, attempt: Attempt, now_s: float) -> None:
        self._choice = choice
        self._attempt = attempt
        self._end_s = attempt.ended_s or now_s
        output = attempt.output_after if attempt.ended_s else choice.tokens.output_tokens
        self._output = output - attempt.output_before

    def rows(self) -> Iterator[Hop]:
        attempt, end_s = self._attempt, self._end_s
        decided_s = attempt.placed_s - attempt.placing_s if attempt.placed_s else end_s
        yield self._hop("attempt", 0, attempt.queued_s, end_s, tokens=self._output, problem=attempt.problem)
        yield self._hop("queue", 1, attempt.queued_s, decided_s)
        if not attempt.placed_s:
            return
        yield self._hop("placement", 1, decided_s, attempt.placed_s)
        runs_prompt = attempt.prefill_worker or attempt.decode_worker
        if attempt.timeline is None:
            yield self._hop("prefill", 1, attempt.placed_s, attempt.first_s or end_s, worker=runs_prompt)
        else:
            yield from self._prompt(attempt.timeline, runs_prompt)
        if attempt.first_s:
            yield self._hop("decode", 1, attempt.first_s, end_s, worker=attempt.decode_worker, tokens=self._output)

    def _prompt(self, timeline: Timeline, worker: str) -> Iterator[Hop]:
        """Yields the hops from the placement to the first token."""
        attempt = self._attempt
        sent_s, first_s, off_by_ms = _between(attempt.placed_s, attempt.first_s, timeline.first_us)
        if not timeline.arrived_us:
            yield from self._prefill(timeline, worker, sent_s, first_s, off_by_ms)
            return
        granted_s, arrived_s = sent_s + timeline.granted_us / 1e6, sent_s + timeline.arrived_us / 1e6
        decodes = attempt.decode_worker
        yield self._hop("reservation", 1, sent_s, granted_s, worker=decodes, off_by_ms=off_by_ms)
        got_s, done_s, more_ms = _between(granted_s, arrived_s, timeline.prefill_us)
        yield from self._prefill(timeline, worker, got_s, done_s, round(off_by_ms + more_ms, 3))
        yield self._hop("first step", 1, arrived_s, first_s, worker=decodes, off_by_ms=off_by_ms)

    def _prefill(self, timeline: Timeline, worker: str, got_s: float, done_s: float, off_by_ms: float) -> Iterator[Hop]:
        tokens = sum(chunk.tokens for chunk in timeline.chunks)
        prefill = self._hop("prefill", 1, got_s, done_s, worker=worker, tokens=tokens, off_by_ms=off_by_ms)
        yield prefill
        hop = partial(self._hop, depth=2, parent=prefill, off_by_ms=off_by_ms)
        if timeline.chunks:
            yield hop("prefill queue", began_s=got_s, ended_s=got_s + timeline.chunks[0].start_us / 1e6, worker=worker)
        for chunk in timeline.chunks:
            began_s = got_s + chunk.start_us / 1e6
            ended_s = began_s + chunk.took_us / 1e6
            yield hop("prefill chunk", began_s=began_s, ended_s=ended_s, worker=worker, tokens=chunk.tokens)
        for push in timeline.pushes:
            began_s = got_s + push.start_us / 1e6
            yield hop(
                "KV push",
                began_s=began_s,
                ended_s=began_s + push.took_us / 1e6,
                worker=f"{worker} rank {push.rank}" if push.rank else worker,
                kv_bytes=push.kv_bytes,
                layers=push.layers,
                gb_per_s=round(push.kv_bytes / max(1, push.busy_us) / 1e3, 3),
                transport=self._attempt.transport,
            )

    def _hop(
        self,
        name: str,
        depth: int,
        began_s: float,
        ended_s: float,
        parent: Hop | None = None,
        **facts: Any,
    ) -> Hop:
        """A hop within its parent (None: its attempt), whatever a worker says. `facts`: further fields."""
        first_s, last_s = (parent.began_s, parent.ended_s) if parent else (self._attempt.queued_s, self._end_s)
        began_s = min(max(began_s, first_s), last_s)
        ended_s = min(max(ended_s, began_s), last_s)
        return Hop(name, depth, self._choice.index, self._attempt.number, began_s, ended_s, **facts)


def _between(sent_s: float, back_s: float, took_us: int) -> tuple[float, float, float]:
    """Where what took `took_us` lies between two moments: its begin, its end, and by how many ms both may be off."""
    slack_s = max(0.0, back_s - sent_s - took_us / 1e6) / 2
    return sent_s + slack_s, sent_s + slack_s + took_us / 1e6, round(slack_s * 1e3, 3)
