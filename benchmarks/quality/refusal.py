"""One run whose requests may be refused, and copies of the run that let a refused request in.

A copy is a fork of the process: it goes on with the same arrivals and the same rule, so that the run itself is not
disturbed.
"""

import gc
import math
import os
import random
import traceback
from collections.abc import Callable
from functools import partial, wraps
from heapq import heapify
from typing import Any, Final, Never

import msgspec
from msgspec import Struct

from benchmarks.quality.policies import Placed
from benchmarks.quality.simulation import Fleet, Run
from benchmarks.quality.trace import TraceRequest
from benchmarks.quality.worker import Job
from router.placement.candidates import NO_WORK
from router.placement.early_refusal import TooLate, check_in_time
from router.placement.placement import weigh
from router.placement.weights import Weights
from runtime.discovery.worker_key import WorkerKey

CONFIG: Final = Weights(prefill_queue_tokens=2**31 - 1)  # simulated requests wait at the workers


class Fate(Struct):
    """What became of one request."""

    arrived_s: float
    refused: bool
    ttft_s: float = math.inf
    expected_s: float = math.inf  # its TTFT, when it arrived


class Probe(Struct, frozen=True):
    """What a copy saw that let one request in."""

    number: int  # of the request
    ttft_s: float
    promised: dict[int, bool]  # requests that had been let in and waited: whether they are in time in the copy
    later: dict[int, bool]  # likewise those that arrived before this one was due; False also when refused


def ending_copies(step: Callable[..., None]) -> Callable[..., None]:
    """A fault ends the copy it happens in, because behind the copy's callers the run would go on a second time."""

    @wraps(step)
    def taken(run: "Refusing", *arguments: Any) -> None:
        try:
            step(run, *arguments)
        except BaseException:
            if os.getpid() == run._pid:
                raise
            traceback.print_exc()
            os._exit(1)

    return taken


class Refusing(Run):
    """The router's rule refuses. `share`: of the requests is let in, whatever the rule says. `probes`: the share of the
    refused that a copy lets in."""

    def __init__(
        self, fleet: Fleet, seed: int = 0, *, share: float | None = None, probes: float = 0.0, from_s: float = 0.0
    ) -> None:
        super().__init__(fleet, partial(Placed, CONFIG), seed)
        self.fates: dict[int, Fate] = {}
        self.probes: list[Probe] = []
        self._due_s = fleet.due_ms / 1e3
        self._share, self._probes, self._from_s, self._dice = share, probes, from_s, random.Random(seed)
        self._waits: dict[int, None] = {}  # numbers of those that were let in and have no first token
        self._promised: list[int] = []  # in a copy: those that waited when it began
        self._probe: Fate | None = None  # in a copy: of the one that it lets in
        self._answer = -1  # in a copy: the pipe's end
        self._pid = os.getpid()  # of the run

    @ending_copies
    def arrive(self, now_s: float, request: TraceRequest) -> None:
        self.until(now_s)
        self._set_clock(now_s)
        fate = self.fates[request.number] = Fate(now_s, False)
        fate.refused = self._refuses(request, fate) if self._share is None else self._dice.random() >= self._share
        if fate.refused and self._probe is None and now_s > self._from_s and self._dice.random() < self._probes:
            self._answer, reply = fork()
            if reply is not None:
                self.probes.append(msgspec.msgpack.decode(reply, type=Probe))
            else:
                self._promised, self._probe, fate.refused = list(self._waits), fate, False
        if not fate.refused:
            self._waits[request.number] = None
            super().arrive(now_s, request)

    def was_wrong(self, probe: Probe, *, spares: bool) -> bool:
        """Whether the request could have been met; `spares`: without making one late that had been let in and that this
        run had in time."""
        return self._is_kept(probe.ttft_s) and not (spares and self._lost(probe.promised))

    def was_harmless(self, probe: Probe) -> bool:
        """Whether the request could have been met, and also everyone who came before it was due and whom this run had
        in time."""
        return self.was_wrong(probe, spares=True) and not self._lost(probe.later)

    def gain(self, probe: Probe) -> int:
        """How many more requests are in time in the copy than in this run, the one that it lets in among them."""
        others = probe.promised | probe.later
        kept = sum(self._is_kept(self.fates[number].ttft_s) for number in others)
        return self._is_kept(probe.ttft_s) + sum(others.values()) - kept

    def _lost(self, in_copy: dict[int, bool]) -> bool:
        """Whether the copy is too late for somebody whom this run had in time."""
        return any(self._is_kept(self.fates[number].ttft_s) for number, in_time in in_copy.items() if not in_time)

    def _is_kept(self, ttft_s: float) -> bool:
        return ttft_s <= self._due_s

    def _refuses(self, request: TraceRequest, fate: Fate) -> bool:
        facts, due_ms = self.routers[0].question(request), self.fleet.due_ms
        weighing = weigh(facts.request, facts.decode, facts.prefill, CONFIG, self._dice, due_ms=due_ms)
        fate.expected_s = weighing.decode.ttft_ms(weighing.decode.chosen) / 1e3
        try:
            check_in_time(weighing, NO_WORK, due_ms)
        except TooLate:
            return True
        return False

    @ending_copies
    def until(self, end_s: float) -> None:
        probe = self._probe
        if probe is None:
            super().until(end_s)
            return
        due_s = probe.arrived_s + self._due_s
        known_s = due_s + self._due_s  # who came before it was due is in time or late by then
        super().until(min(end_s, known_s))
        if end_s >= known_s:
            number = next(number for number, fate in self.fates.items() if fate is probe)
            in_time = {number: self._is_kept(fate.ttft_s) for number, fate in self.fates.items()}
            later = [other for other, fate in self.fates.items() if other > number and fate.arrived_s <= due_s]
            others = ({other: in_time[other] for other in some} for some in (self._promised, later))
            answer(self._answer, Probe(number, probe.ttft_s, *others))

    def note(self, job: Job) -> None:
        super().note(job)
        self.fates[job.request.number].ttft_s = job.first_token_s - job.arrived_s
        self._waits.pop(job.request.number, None)


class Foreseeing(Refusing):
    """Lets a request in if that is in time and makes nobody late who was let in: a copy has tried. Mixed fleets
    only. Nobody later need be tried, because the rule lets in nobody who does harm."""

    def __init__(self, fleet: Fleet, seed: int = 0, **probing: float) -> None:
        super().__init__(fleet, seed, **probing)
        assert not fleet.prefill_workers
        self._chosen: WorkerKey = ("", 0)

    def _submit(self, key: WorkerKey, job: Job, now_s: float) -> None:
        self._chosen = key
        super()._submit(key, job, now_s)

    def _refuses(self, request: TraceRequest, fate: Fate) -> bool:
        end, reply = fork()
        if reply is None:
            self._try(request, fate, end)
        return msgspec.msgpack.decode(reply, type=bool)

    def _try(self, request: TraceRequest, fate: Fate, end: int) -> Never:
        """Answers, in the copy, whether the request has to be refused."""
        self._probe = None
        Run.arrive(self, fate.arrived_s, request)
        self._coming = [event for event in self._coming if event[2] == self._chosen]
        heapify(self._coming)
        worker = self.workers[self._chosen]
        here = [job for job in worker.prompts() if job.sequence.due_s > fate.arrived_s]
        due_s = {job.request.number: job.sequence.due_s for job in here}
        if request.number not in due_s:
            answer(end, True)
        while due_s:
            at_s = self._coming[0][0] if self._coming else math.inf
            if min(due_s.values()) < at_s:
                answer(end, True)
            Run.until(self, at_s)
            due_s = {number: due_s[number] for number in due_s if self.fates[number].ttft_s == math.inf}
        answer(end, False)


def fork() -> tuple[int, bytes | None]:
    """Forks the process. In the run: -1 and what the copy has answered. In the copy: where it answers, and None. Raises
    RuntimeError when the copy fails."""
    reader, writer = os.pipe()
    copy = os.fork()
    if not copy:
        os.close(reader)
        gc.freeze()  # what others here have left, such as gRPC's objects, waits for threads that the copy has not
        return writer, None
    os.close(writer)
    with open(reader, "rb") as file:
        reply = file.read()
    if os.waitpid(copy, 0)[1]:
        raise RuntimeError("a copy of the run has failed")
    return -1, reply


def answer(end: int, reply: object) -> Never:
    """Ends the copy."""
    with open(end, "wb") as file:
        file.write(msgspec.msgpack.encode(reply))
    os._exit(0)
