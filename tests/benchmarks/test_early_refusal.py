"""Copies of a run that let a refused request in."""

import math
import os
from collections.abc import Callable
from functools import partial

import pytest

from benchmarks.quality.refusal import Fate, Foreseeing, Probe, Refusing
from benchmarks.quality.simulation import Fleet, Run
from benchmarks.quality.trace import TraceRequest
from benchmarks.quality.traffic import Documents, generated
from runtime.config.serving import MockConfig

FLEET = Fleet(workers=1, engine=MockConfig(speed_up=2), expects=True, due_ms=2000.0)
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
    probe = Probe(2, ttft_s, [1])
    assert (run.was_wrong(probe, spares=True), run.was_wrong(probe, spares=False)) == (wrong, alone)


def test_who_foresees_all_lets_nobody_in_who_comes_late(documents: list[TraceRequest]) -> None:
    fates = ran(Foreseeing(FLEET), documents).fates.values()
    assert any(fate.refused for fate in fates)
    assert all(fate.refused or fate.ttft_s <= 2.0 for fate in fates)
