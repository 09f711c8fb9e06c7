"""How fast workers are is learned from the steps that they report."""

import random

import pytest

from baton_proto.discovery import LoadReport, TimedStep, WorkerLoad
from router.workers.load import LoadLedger
from router.workers.step_speed import StepSpeeds
from runtime.config.step_times import StepTimes

WORKER = ("d", 1)
PROFILE = StepTimes()
SLOW = StepTimes(*(3 * ms for ms in (*PROFILE.prefill, *PROFILE.decode)))


def step(dice: random.Random, *, prompts: bool, decodes: bool) -> TimedStep:
    tokens, sequences = prompts * dice.randrange(500, 8000), decodes * dice.randrange(1, 64)
    pairs, context = tokens * tokens / 2, sequences * 700
    return TimedStep(tokens, pairs, sequences, context, SLOW.step_ms(tokens, pairs, sequences, context))


def report(steps: list[TimedStep], worker_id: str = "d") -> LoadReport:
    return LoadReport(1, worker_id, 1, WorkerLoad(), steps=steps)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_worker_that_is_slower_than_the_profile_is_known_after_some_seconds(mixed: bool) -> None:
    """At four steps a second; also where hardly a step only computes prompts."""
    dice, ledger = random.Random(1), LoadLedger(16, 300.0, times=PROFILE)
    speeds = StepSpeeds(ledger, PROFILE)
    ledger.report(WORKER, WorkerLoad())
    for second in range(20):
        kinds = [(True, mixed), (False, True)] * 2
        speeds.load_report(report([step(dice, prompts=prompts, decodes=decodes) for prompts, decodes in kinds]))
        if second == 3:
            assert ledger.times((WORKER,))[0, 1] == PROFILE.prefill_token_ms, "too few to say"
    learned = StepTimes(*ledger.times((WORKER,))[0].tolist())
    for n in (1000, 4000):
        assert learned.prefill_ms(n, n * n / 2) == pytest.approx(SLOW.prefill_ms(n, n * n / 2), rel=0.1)
    assert learned.decode_ms(32, 22_400) == pytest.approx(SLOW.decode_ms(32, 22_400), rel=0.1)


def test_a_worker_that_the_ledger_does_not_know_leaves_nothing_behind() -> None:
    ledger = LoadLedger(16, 300.0)
    speeds = StepSpeeds(ledger, PROFILE)
    speeds.load_report(report([TimedStep(100, 5000.0, 0, 0, 9.0)], "stranger"))
    assert not speeds._steps
    assert not ledger.knows(("stranger", 1))
