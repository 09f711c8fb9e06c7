"""Copies of a run that let a refused request in."""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.early_refusal import PRECISION, Probed, Trial, interval
from benchmarks.quality.refusal import Fate, Foreseeing, Probe, Refusing
from benchmarks.quality.simulation import Fleet, Run
from benchmarks.quality.trace import TraceRequest
from benchmarks.quality.traffic import Documents, generated
from benchmarks.quality.worker import SimulatedEngine

FLEET = Fleet(workers=1, engine=SimulatedEngine(speed_up=2), expects=True, due_ms=2000.0)
GAP_S = 0.1


@pytest.fixture(scope="module")
def documents() -> list[TraceRequest]:
    """Forty, each with one question: more than a worker reads in time."""
    return generated(Documents(questions=(1, 1)), FLEET.block_size, 40)


def ran(run: Refusing, requests: list[TraceRequest]) -> Refusing:
    for place, request in enumerate(requests, 1):
        run.arrive(GAP_S * place, request)
    run.until(math.inf)
    return run


def test_copies_leave_the_run_as_it_is(documents: list[TraceRequest]) -> None:
    alone, with_probes = (ran(Refusing(FLEET, probes=share), documents) for share in (0.0, 1.0))
    assert alone.fates == with_probes.fates
    refused = [number for number, fate in with_probes.fates.items() if fate.refused]
    assert refused
    assert [probe.number for probe in with_probes.probes] == refused[: len(with_probes.probes)]
    assert with_probes.probes


@pytest.mark.parametrize("rule", [partial(Refusing, probes=1.0), Foreseeing])
def test_a_fault_in_a_copy_ends_the_copy_and_fails_the_run_once(
    rule: Callable[[Fleet], Refusing], documents: list[TraceRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, original = os.getpid(), Run.arrive

    def arrive(run: Run, now_s: float, request: TraceRequest) -> None:
        if os.getpid() != here:
            raise ValueError("a fault")
        original(run, now_s, request)

    monkeypatch.setattr(Run, "arrive", arrive)
    with pytest.raises(RuntimeError, match="a copy of the run has failed"):
        ran(rule(FLEET), documents)
    assert os.getpid() == here


def test_a_refusal_of_what_an_idle_worker_has_in_time_is_wrong(documents: list[TraceRequest]) -> None:
    run = ran(Refusing(FLEET, probes=1.0, share=0.0), documents[:1] + documents[30:])
    probe = run.probes[0]
    assert probe.ttft_s < 2.0
    assert all(run.was_wrong(probe, spares=spares) for spares in (True, False))


@pytest.mark.parametrize(
    ("ttft_s", "other_s", "wrong", "alone"),
    [
        (1.0, 1.0, False, True),
        (1.0, 3.0, True, True),  # that one is late anyway
        (math.inf, 3.0, False, False),
    ],
)
def test_a_promise_that_was_kept_excuses_the_refusal(ttft_s: float, other_s: float, wrong: bool, alone: bool) -> None:
    run = Refusing(FLEET)
    run.fates[1] = Fate(0.0, False, other_s)
    probe = Probe(2, ttft_s, {1: False}, {})
    assert (run.was_wrong(probe, spares=True), run.was_wrong(probe, spares=False)) == (wrong, alone)


def test_who_foresees_all_lets_nobody_in_who_comes_late(documents: list[TraceRequest]) -> None:
    fates = ran(Foreseeing(FLEET), documents).fates.values()
    assert any(fate.refused for fate in fates)
    assert all(fate.refused or fate.ttft_s <= 2.0 for fate in fates)


@pytest.mark.parametrize(
    ("in_run_s", "in_copy", "harmless", "gain"),
    [
        (1.0, True, True, 1),
        (1.0, False, False, 0),  # it took the other one's place
        (math.inf, True, True, 2),
        (math.inf, False, True, 1),  # the other one is refused or late anyway
    ],
)
def test_whoever_comes_later_counts_for_harm_and_gain(
    in_run_s: float, in_copy: bool, harmless: bool, gain: int
) -> None:
    run = Refusing(FLEET)
    run.fates[3] = Fate(0.0, in_run_s == math.inf, in_run_s)
    probe = Probe(2, 1.0, {}, {3: in_copy})
    assert (run.was_wrong(probe, spares=True), run.was_harmless(probe), run.gain(probe)) == (True, harmless, gain)


def test_a_copy_tells_of_all_who_came_before_its_request_was_due(documents: list[TraceRequest]) -> None:
    run = ran(Refusing(FLEET, probes=1.0), documents)
    probe = run.probes[0]
    due_s = run.fates[probe.number].arrived_s + 2.0
    assert list(probe.later) == [n for n, fate in run.fates.items() if n > probe.number and fate.arrived_s <= due_s]


def test_an_interval_holds_the_share_and_narrows_with_the_probes() -> None:
    few, many = interval(1, 4), interval(100, 400)
    assert few == pytest.approx((0.0456, 0.6994), abs=1e-4)
    assert few[0] < many[0] < 0.25 < many[1] < few[1]
    assert interval(0, 39) == pytest.approx((0.0, 0.0897), abs=1e-4)


def test_the_wrongly_refused_are_a_share_of_all_who_could_have_been_met() -> None:
    run = Refusing(FLEET)
    assert Probed.of(run, 0.5, 0.0) == Probed(0)
    run.probes = [Probe(1, 1.0, {}, {}), Probe(2, math.inf, {}, {})]
    probed = Probed.of(run, 0.5, 0.2)
    assert (probed.wrong, probed.wrong_of_meetable) == (0.5, pytest.approx(0.25 / (0.25 + 0.4)))


class Scripted(Trial):
    """A fleet that keeps up with 33 requests a second, where each run lasts 30 s."""

    def __init__(self) -> None:
        self._rate, self._due_s = 5.0, 2.0

    def run(self, per_s: float, rule: str = "router", most_late: float = 1.0, **settings: Any) -> Refusing:
        run = Refusing(FLEET)
        run.fates = {n: Fate(n / per_s, False, 0.5 if per_s <= 33 else 2.5) for n in range(round(30 * per_s))}
        return run


def test_the_capacity_is_what_is_in_time_at_the_highest_rate_that_is_kept_up() -> None:
    trial = Scripted()
    rate, in_time_per_s = trial.capacity()
    assert 33 / (1 + PRECISION) <= rate <= 33
    assert in_time_per_s == trial.in_time_per_s(trial.run(rate)) == pytest.approx(rate, rel=0.01)
