"""How fast workers are is learned from the steps that they report."""

import random

import pytest
from msgspec.structs import replace

from baton_proto.discovery import LoadReport, TimedStep, WorkerLoad
from router.workers.account import NOTHING, Totals
from router.workers.load import LoadLedger
from router.workers.step_speed import TYPICAL, StepSpeeds
from runtime.config.step_fit import RECENT, REFIT_AFTER, WINDOW
from runtime.config.step_times import StepTimes

WORKER = ("d", 1)
PROFILE = StepTimes()
SLOW = StepTimes(*(3 * ms for ms in (*PROFILE.prefill, *PROFILE.decode)))


def step(dice: random.Random, *, prompts: bool, decodes: bool) -> TimedStep:
    tokens, sequences = prompts * dice.randrange(500, 8000), decodes * dice.randrange(1, 64)
    pairs, context = tokens * tokens / 2, sequences * 700
    return TimedStep(tokens, pairs, sequences, context, SLOW.step_ms(tokens, pairs, sequences, context))


def report(steps: list[TimedStep], worker_id: str = "d") -> LoadReport:
    return LoadReport(version=1, worker_id=worker_id, incarnation=1, load=WorkerLoad(), steps=steps)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_worker_that_is_slower_than_the_profile_is_known_after_some_steps(mixed: bool) -> None:
    """Also where hardly a step only computes prompts."""
    dice, ledger = random.Random(1), LoadLedger(16, 300.0, times=PROFILE)
    speeds = StepSpeeds(ledger, PROFILE)
    ledger.report(WORKER, WorkerLoad())
    for number in range(20):
        kinds = [(True, mixed), (False, True)] * 2
        speeds.load_report(report([step(dice, prompts=prompts, decodes=decodes) for prompts, decodes in kinds]))
        if number == 3:
            assert ledger.times((WORKER,))[0, 1] == PROFILE.prefill_token_ms, "too few to say"
    learned = StepTimes(*ledger.times((WORKER,))[0].tolist())
    for n in (1000, 4000):
        assert learned.prefill_ms(n, n * n / 2) == pytest.approx(SLOW.prefill_ms(n, n * n / 2), rel=0.1)
    assert learned.decode_ms(32, 22_400) == pytest.approx(SLOW.decode_ms(32, 22_400), rel=0.1)


def test_a_step_without_prompts_and_decodes_or_shorter_than_its_decodes_alone_teaches_nothing() -> None:
    ledger = LoadLedger(16, 300.0, times=PROFILE)
    speeds = StepSpeeds(ledger, PROFILE)
    ledger.report(WORKER, WorkerLoad())
    beside_ms = PROFILE.beside_ms(8, 4000)
    empty = [TimedStep(0, 0.0, 0, 0, 5.0), TimedStep(0, 0.0, 8, 4000, 0.0), TimedStep(100, 5000.0, 8, 4000, beside_ms)]
    speeds.load_report(report(empty * 100))
    assert StepTimes(*ledger.times((WORKER,))[0].tolist()) == PROFILE


def test_steps_are_fitted_when_they_are_enough_and_again_after_some_more() -> None:
    ledger = LoadLedger(16, 300.0, times=PROFILE)
    speeds = StepSpeeds(ledger, PROFILE)
    ledger.report(WORKER, WorkerLoad())

    def after(count: int, step_ms: float) -> StepTimes:
        steps = [TimedStep(0, 0.0, 1 + i % 7, 100 * i, step_ms * (1 + i % 7)) for i in range(count)]
        speeds.load_report(report(steps))
        return StepTimes(*ledger.times((WORKER,))[0].tolist())

    assert after(RECENT - 1, 0.1) == PROFILE
    first = after(1, 0.1)
    assert first.decode_ms(4, 0) < 1.0
    assert after(REFIT_AFTER - 1, 0.2) == first
    assert after(1, 0.2) != first


class Fleet:
    """Step times as a ledger has them, as multiples of the profile's, prompts and decodes."""

    def __init__(self, *worker_ids: str) -> None:
        self.now_s = 100.0
        self.ledger = LoadLedger(16, 300.0, clock=lambda: self.now_s, times=PROFILE)
        self.speeds = StepSpeeds(self.ledger, PROFILE)
        self.dice = random.Random(5)
        for worker_id in worker_ids:
            self.ledger.report((worker_id, 1), WorkerLoad())

    def report(self, worker_id: str, slower: float = 1.0, *, prompts: int = 0, decodes: int = 0) -> None:
        kinds = [(True, False)] * prompts + [(False, True)] * decodes
        steps = [step(self.dice, prompts=one, decodes=other) for one, other in kinds]
        self.now_s += 1.0
        self.speeds.load_report(report([replace(one, step_ms=one.step_ms * slower / 3) for one in steps], worker_id))

    def ratios(self, worker_id: str) -> list[float]:
        times = StepTimes(*self.ledger.times(((worker_id, 1),))[0].tolist())
        return [
            times.prefill_ms(4000, 8e6) / PROFILE.prefill_ms(4000, 8e6),
            times.decode_ms(32, 22_400) / PROFILE.decode_ms(32, 22_400),
        ]


def test_a_worker_that_has_shown_nothing_is_expected_to_be_as_fast_as_the_others_of_each_kind_of_step() -> None:
    """Else a worker with the prefix, known to be slow as all are, loses to one without it that is not known yet."""
    fleet = Fleet("a", "b", "c", "before", "after")
    fleet.report("before")
    assert fleet.ratios("before") == [1.0, 1.0]
    for worker_id, slower in (("a", 2.0), ("b", 3.0), ("c", 30.0)):
        fleet.report(worker_id, slower, prompts=WINDOW)
    assert fleet.ratios("before") == [pytest.approx(3.0, rel=0.02), 1.0], "nobody has decoded"
    fleet.report("b", 3.0, decodes=WINDOW)
    fleet.report("after")
    for worker_id in ("before", "after"):
        assert fleet.ratios(worker_id) == pytest.approx([3.0, 3.0], rel=0.02)
    assert fleet.ratios("c") == pytest.approx([30.0, 3.0], rel=0.02), "what it has shown itself holds"
    fleet.report("after", 1.0, prompts=RECENT)
    assert fleet.ratios("after") == pytest.approx([1.0, 3.0], rel=0.15)
    assert fleet.ratios("before") == pytest.approx([2.0, 3.0], rel=0.05), "the second of four"
    fleet.speeds.forget(("before", 1))
    fleet.report("c", 30.0, prompts=REFIT_AFTER)
    expected = {"a": [2.0, 1.0], "b": [3.0, 3.0], "c": [30.0, 1.0], "after": [1.0, 1.0]}
    usual_ms = PROFILE.prefill_ms(*TYPICAL[:2]), PROFILE.beside_ms(*TYPICAL[2:])
    for (worker_id,), slowness in fleet.speeds.slowness():
        ms = [one * usual for one, usual in zip(expected.pop(worker_id), usual_ms, strict=True)]
        assert slowness == pytest.approx(sum(ms) / sum(usual_ms), rel=0.1), "what it has not shown is not its own"
    assert not expected


def test_how_fast_workers_usually_are_is_seen_once_a_second_and_at_the_next_report_when_it_was_too_soon() -> None:
    fleet = Fleet("a", "b", "c")
    fleet.report("c")
    fleet.report("a", 2.0, prompts=WINDOW)
    assert fleet.ratios("c")[0] == pytest.approx(2.0, rel=0.02)
    fleet.now_s -= 0.5
    fleet.report("b", 1.0, prompts=WINDOW)
    assert fleet.ratios("c")[0] == pytest.approx(2.0, rel=0.02)
    fleet.report("b")
    assert fleet.ratios("c")[0] == pytest.approx(1.0, rel=0.02)


def test_a_worker_whose_account_was_closed_changes_no_other_times() -> None:
    fleet = Fleet("a", "b")
    fleet.ledger.set_foreign("router", ("gone", 1), Totals(1, 100, 7))
    fleet.report("gone")
    fleet.ledger.set_foreign("router", ("gone", 1), NOTHING)
    assert not fleet.ledger.knows(("gone", 1))
    fleet.report("a", 2.0, prompts=WINDOW)
    fleet.report("b")
    assert [fleet.ratios(worker_id)[0] for worker_id in "ab"] == pytest.approx([2.0, 2.0], rel=0.02)


def test_a_short_prompt_alone_takes_all_of_its_step() -> None:
    ledger = LoadLedger(16, 300.0, times=PROFILE)
    speeds = StepSpeeds(ledger, PROFILE)
    ledger.report(WORKER, WorkerLoad())
    speeds.load_report(report([TimedStep(n, n * n / 2, 0, 0, n / 1000) for n in range(1000, 5000, 100)]))
    learned = StepTimes(*ledger.times((WORKER,))[0].tolist())
    assert learned.prefill_ms(2000, 2e6) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("kind", ["prompts", "decodes"])
def test_a_worker_that_has_become_slow_or_quick_is_known_by_its_next_sixteen_steps(kind: str) -> None:
    """However many it has reported before. The steps of the other kind stay what they were."""
    dice, ledger = random.Random(3), LoadLedger(16, 300.0, times=PROFILE)
    speeds = StepSpeeds(ledger, PROFILE)
    ledger.report(WORKER, WorkerLoad())
    quick = [step(dice, prompts=prompts, decodes=not prompts) for prompts in (True, False) * 2 * WINDOW]
    quick = [replace(one, step_ms=one.step_ms / 3 * dice.lognormvariate(0.0, 0.1)) for one in quick]
    speeds.load_report(report(quick))
    assert speeds.slowness() == [(("d",), pytest.approx(1.0, rel=0.1))]
    for times in (4, 1):
        some = [one for one in quick if bool(one.prompt_tokens) == (kind == "prompts")][:RECENT]
        speeds.load_report(report([replace(one, step_ms=times * one.step_ms) for one in some]))
        learned = StepTimes(*ledger.times((WORKER,))[0].tolist())
        expected = [times if one == kind else 1 for one in ("prompts", "decodes")]
        ratios = [
            learned.prefill_ms(4000, 8e6) / PROFILE.prefill_ms(4000, 8e6),
            learned.decode_ms(32, 22_400) / PROFILE.decode_ms(32, 22_400),
        ]
        assert ratios == pytest.approx(expected, rel=0.15)


def test_steps_that_vary_by_a_tenth_are_no_change() -> None:
    dice, ledger = random.Random(4), LoadLedger(16, 300.0, times=PROFILE)
    speeds = StepSpeeds(ledger, PROFILE)
    ledger.report(WORKER, WorkerLoad())
    for _ in range(50):
        steps = [step(dice, prompts=prompts, decodes=not prompts) for prompts in (True, False) * REFIT_AFTER]
        speeds.load_report(report([replace(one, step_ms=one.step_ms * dice.lognormvariate(0.0, 0.1)) for one in steps]))
    assert len(speeds._steps[WORKER]._prefill) == len(speeds._steps[WORKER]._decode) == WINDOW
    speeds.forget(WORKER)
    speeds.load_report(report([TimedStep(100, 5000.0, 0, 0, 9.0)], "stranger"))
    assert not speeds._steps, "neither of one that left nor of one that the ledger does not know"


def test_ranks_of_a_server_have_one_fit_and_other_workers_their_own() -> None:
    dice, ledger = random.Random(3), LoadLedger(16, 300.0, times=PROFILE)
    servers = {"a-dp0": "one", "a-dp1": "one", "b-dp0": "two", "d": ""}
    speeds = StepSpeeds(ledger, PROFILE, lambda worker: servers[worker[0]])

    def prefill_ms(worker_id: str) -> float:
        return float(ledger.times(((worker_id, 1),))[0, 1])

    def tell(worker_id: str, count: int) -> None:
        speeds.load_report(report([step(dice, prompts=True, decodes=False) for _ in range(count)], worker_id))

    for worker_id in ("a-dp0", "b-dp0", "d"):
        ledger.report((worker_id, 1), WorkerLoad())
        tell(worker_id, 0)
    tell("a-dp0", WINDOW)
    tell("d", WINDOW)
    ledger.report(("a-dp1", 1), WorkerLoad())
    tell("a-dp1", 0)
    assert prefill_ms("a-dp1") == prefill_ms("a-dp0") == pytest.approx(SLOW.prefill_token_ms, rel=0.1)
    assert prefill_ms("d") != prefill_ms("a-dp0"), "a fit of its own"
    tell("a-dp1", REFIT_AFTER)
    assert prefill_ms("a-dp1") == prefill_ms("a-dp0")
    speeds.forget(("a-dp0", 1))
    tell("a-dp1", WINDOW)
    assert {key for (key,), _ in speeds.slowness()} == {"a-dp1", "b-dp0", "d"}
