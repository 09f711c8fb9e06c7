"""Charges: what is put on a worker comes off again, whatever happens in between."""

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import astuple

from baton_proto.discovery import WorkerLoad, prefill_pairs
from router.workers.account import FREEING_S, NOTHING, QUEUED_TOKENS, REPORT_DELAY_S, LoadView, Totals
from router.workers.load import Charge, LoadLedger
from runtime.config.step_times import StepTimes
from runtime.step_rule import AGING
from tests.clock import Clock

D, P = ("d", 1), ("p", 1)
IDLE = LoadView(0, 0, 0)


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def ledger(clock: Clock) -> LoadLedger:
    return LoadLedger(block_size=16, charge_ttl_s=300.0, clock=clock)


def test_a_charge_is_seen_at_once_and_its_prompt_leaves_with_the_first_token(ledger: LoadLedger) -> None:
    charge = ledger.charge("r", D, P, num_tokens=100, prefill_tokens=80)
    assert ledger.view(D) == LoadView(1, 0, 7)
    assert ledger.view(P) == LoadView(0, 80, 0, prefill_pairs(20, 100)), "20 tokens are before them"
    charge.prefill_done()
    charge.prefill_done()
    assert ledger.view(P) == IDLE
    charge.grow(113)
    assert ledger.view(D) == LoadView(1, 0, 8)
    charge.release()
    charge.release()
    assert ledger.view(D) == IDLE


def test_a_local_prompt_is_charged_to_the_decode_worker(ledger: LoadLedger) -> None:
    with ledger.charge("r", D, None, num_tokens=20, prefill_tokens=20):
        assert ledger.view(D) == LoadView(1, 20, 2, prefill_pairs(0, 20))
    assert ledger.view(D) == IDLE


@given(
    st.lists(
        st.tuples(st.sampled_from(["charge", "done", "grow", "release", "wait", "forget"]), st.integers(0, 4)),
        max_size=60,
    )
)
def test_loads_return_to_zero_after_any_course_of_events(steps: list[tuple[str, int]]) -> None:
    clock = Clock(0.0)
    ledger = LoadLedger(16, 300.0, clock)
    workers = [("a", 1), ("b", 1), ("c", 1)]
    charges: list[Charge] = []
    tokens = 0
    for action, n in steps:
        tokens += 37
        if action == "charge":
            charges.append(ledger.charge("r", workers[n % 3], workers[(n + 1) % 3] if n > 2 else None, tokens, tokens))
        elif action == "wait":
            clock.now_s += 100.0 * n
        elif action == "forget":
            ledger.forget(workers[n % 3])
        elif charges:
            charge = charges[n % len(charges)]
            match action:
                case "done":
                    charge.prefill_done()
                case "grow":
                    charge.grow(tokens)
                case "release":
                    charge.release()
        asked = (workers[2], ("never heard of", 1), *workers)
        columns = ledger.columns(asked)[:, :4].tolist()
        assert columns == [list(ledger.view(worker)) if worker in workers else [0, 0, 0, 0] for worker in asked]
        assert min(map(min, columns)) >= 0
    for charge in charges:
        charge.release()
    assert [ledger.view(worker) for worker in workers] == [IDLE] * 3


def test_a_charge_that_nobody_released_expires_and_a_living_one_does_not(ledger: LoadLedger, clock: Clock) -> None:
    lost = ledger.charge("lost", D, P, 100, 100)
    living = ledger.charge("living", D, P, 32, 32)
    clock.now_s = 200.0
    living.prefill_done()
    living.grow(33)
    clock.now_s = 301.0
    assert ledger.view(D) == LoadView(1, 0, 3)
    assert ledger.view(P) == IDLE
    lost.release()
    assert ledger.view(D) == LoadView(1, 0, 3)


def test_the_larger_of_charge_and_report_counts(ledger: LoadLedger) -> None:
    with ledger.charge("r", D, P, num_tokens=160, prefill_tokens=160):
        ledger.report(D, WorkerLoad(running=5, waiting=1, blocks_used=4))
        ledger.report(P, WorkerLoad(queued_prefill_tokens=1000))
        assert ledger.view(D) == LoadView(6, 0, 10)
        assert ledger.view(P).queued_prefill_tokens == 160, "the report counts what is cached of waiting prompts, too"
    assert ledger.view(P).queued_prefill_tokens == 1000, "nobody knows better"


def test_whoever_waits_for_room_is_told_of_relief_only() -> None:
    relieved: list[str] = []
    ledger = LoadLedger(16, 300.0, relieved=lambda: relieved.append("x"))
    charge = ledger.charge("r", D, P, 100, 100)
    ledger.report(P, WorkerLoad(queued_prefill_tokens=50))
    assert len(relieved) == 0
    ledger.report(P, WorkerLoad(queued_prefill_tokens=20))
    assert len(relieved) == 1
    charge.prefill_done()
    assert len(relieved) == 2
    charge.release()
    assert len(relieved) == 3


def test_what_other_routers_charged_is_added_to_our_own(ledger: LoadLedger) -> None:
    ledger.set_foreign("r1", D, Totals(2, 300, 40, 9_000))
    ledger.set_foreign("r2", D, Totals(1, 0, 5))
    own = prefill_pairs(0, 160)
    with ledger.charge("r", D, None, num_tokens=160, prefill_tokens=160):
        assert ledger.view(D) == LoadView(4, 460, 55, 9_000 + own)
        ledger.report(D, WorkerLoad(running=3, blocks_used=60, queued_prefill_tokens=100))
        assert ledger.view(D) == LoadView(4, 460, 60, 9_000 + own), "the report counts the same requests"
        ledger.set_foreign("r1", D, NOTHING)
        assert ledger.view(D) == LoadView(3, 160, 60, own)
    assert ledger.charged() == {}


def test_relief_by_another_router_is_told_too() -> None:
    relieved: list[str] = []
    ledger = LoadLedger(16, 300.0, relieved=lambda: relieved.append("x"))
    ledger.set_foreign("r1", D, Totals(2, 300, 40))
    assert not relieved
    ledger.set_foreign("r1", D, Totals(2, 0, 40))
    assert len(relieved) == 1


def test_what_changed_is_told_once_and_as_totals() -> None:
    news: list[str] = []
    ledger = LoadLedger(16, 300.0, has_news=lambda: news.append("x"))
    first = ledger.charge("r", D, P, num_tokens=100, prefill_tokens=80)
    second = ledger.charge("r", D, P, num_tokens=16, prefill_tokens=16)
    assert len(news) == 1
    pairs = prefill_pairs(20, 100)
    assert ledger.take_changed() == {D: Totals(2, 0, 8), P: Totals(0, 96, 0, pairs + prefill_pairs(0, 16))}
    assert ledger.take_changed() == {}
    second.prefill_done()
    assert len(news) == 2
    assert ledger.take_changed() == {P: Totals(0, 80, 0, pairs)}
    second.grow(16)
    assert ledger.take_changed() == {}, "the same blocks"
    first.release()
    second.release()
    assert ledger.take_changed() == {D: NOTHING, P: NOTHING}


def test_workers_that_are_gone_leave_no_account_behind(ledger: LoadLedger) -> None:
    ledger.set_foreign("r1", D, Totals(2, 300, 40))
    ledger.forget(D)
    assert ledger.view(D) == IDLE
    ledger.set_foreign("r1", ("late", 1), Totals(1, 1, 1))
    ledger.set_foreign("r1", ("late", 1), NOTHING)
    assert ("late", 1) not in ledger._accounts


def test_a_worker_has_the_profiles_step_times_until_its_own_are_learned_and_its_successor_again() -> None:
    profile, slow = StepTimes(), StepTimes(12.0, 0.04, 2.4e-6, 10.0, 0.04, 8.4e-5)
    ledger = LoadLedger(16, 300.0, times=profile)
    for worker in (D, P):
        ledger.report(worker, WorkerLoad())
    ledger.learn(D, slow)
    ledger.learn_restoring(D, 0.001, 0.02)
    asked = (D, P, ("unknown", 1))
    assert [tuple(row) for row in ledger.times(asked).tolist()] == [astuple(slow), astuple(profile), astuple(profile)]
    assert ledger.restoring(asked).tolist() == [[0.001, 0.02], [0.0, 0.0], [0.0, 0.0]]
    ledger.forget(D)
    ledger.report(D, WorkerLoad())
    assert tuple(ledger.times((D,))[0].tolist()) == astuple(profile)
    assert ledger.restoring((D,)).tolist() == [[0.0, 0.0]]


def test_a_step_begins_with_a_report_or_with_a_prompt_for_an_idle_worker(ledger: LoadLedger, clock: Clock) -> None:
    def began_us() -> int:
        return int(ledger.columns((D,))[0, 4])

    clock.now_s = 5.0
    first = ledger.charge("first", D, None, 100, 100)
    assert began_us() == 5_000_000
    clock.now_s = 6.0
    ledger.charge("second", D, None, 100, 100)
    assert began_us() == 5_000_000, "it waits for the first"
    ledger.report(D, WorkerLoad(running=2, queued_prefill_tokens=100))
    assert began_us() == 6_000_000
    first.release()


def test_a_prompt_of_another_router_begins_a_step_on_an_idle_worker_and_no_other_one(
    ledger: LoadLedger, clock: Clock
) -> None:
    began_us = []
    ledger.report(D, WorkerLoad(blocks_total=100))
    for seconds, totals in ((5, Totals(1, 300, 40)), (1, Totals(2, 500, 60)), (1, NOTHING), (1, Totals(1, 9, 1))):
        clock.now_s += seconds
        ledger.set_foreign("r1", D, totals)
        began_us.append(int(ledger.columns((D,))[0, 4]) - ledger.now_us)
    assert began_us == [0, -1_000_000, -2_000_000, 0]


def test_the_report_knows_how_much_of_a_long_prompt_is_computed(ledger: LoadLedger, clock: Clock) -> None:
    clock.now_s += 10
    ledger.report(D, WorkerLoad())
    charge = ledger.charge("long", D, None, num_tokens=16_000, prefill_tokens=16_000)
    ledger.report(D, WorkerLoad(waiting=1, queued_prefill_tokens=16_000))
    assert ledger.view(D).queued_prefill_tokens == 16_000, "it was charged a moment ago, and is not counted twice"
    for left in (12_000, 8000, 4000):
        clock.now_s += 1.1 * REPORT_DELAY_S
        ledger.report(D, WorkerLoad(running=1, queued_prefill_tokens=left))
    assert ledger.view(D).queued_prefill_tokens == 4000
    with ledger.charge("next", D, None, num_tokens=160, prefill_tokens=160):
        assert ledger.view(D).queued_prefill_tokens == 4160, "which the report cannot know yet"
        ledger.set_foreign("r1", D, Totals(1, 300, 20))
        assert ledger.view(D).queued_prefill_tokens == 4460
    charge.prefill_done()
    assert ledger.view(D).queued_prefill_tokens == 300, "the other router's"
    ledger.report(D, WorkerLoad(running=1))
    ledger.set_foreign("r1", D, NOTHING)
    assert ledger.view(D).queued_prefill_tokens == 0


def test_blocks_come_free_by_what_prompts_took_and_by_how_much_less_is_used(ledger: LoadLedger, clock: Clock) -> None:
    """A prompt of 100 blocks found 60 of them cached. A second router's prompts are taken to have taken as many. The
    worker uses 20 more than before, so that others have freed 60. The request grows, and what it had does not count,
    because the report tells what has come free of it."""
    ledger.num_routers = 2
    ledger.report(D, WorkerLoad(running=3, blocks_used=50, blocks_total=100))
    charge = ledger.charge("r", D, P, num_tokens=1600, prefill_tokens=800, held_blocks=60)
    charge.prefill_done()
    charge.prefill_done()
    ledger.report(D, WorkerLoad(running=4, blocks_used=70, blocks_total=100))
    charge.grow(1760)
    assert ledger.columns((D,))[0, 5:].tolist() == [30, 0, 70, 4], "none has ended"
    charge.release()
    assert ledger.columns((D,))[0, 5:].tolist() == [30, int(FREEING_S * 1e6 / (2 * 40 - 20)), 70, 4]
    ledger.report(D, WorkerLoad(running=3, blocks_used=40, blocks_total=100))
    assert ledger.columns((D,))[0, 5:].tolist() == [60, int(FREEING_S * 1e6 / (2 * 40 - 20 + 30)), 40, 3]


def test_a_request_that_leaves_before_its_first_token_tells_nothing_of_how_blocks_come_free(
    ledger: LoadLedger,
) -> None:
    """Its worker had given it none: at a nearly full pool a client that hung up made the wait minutes long."""
    ledger.report(D, WorkerLoad(running=64, blocks_used=970, blocks_total=1000))
    ledger.charge("waits", D, None, num_tokens=800, prefill_tokens=800).release()
    assert ledger.columns((D,))[0, 5:].tolist() == [30, 0, 970, 64]


def test_what_lets_a_new_prompt_go_first_is_left_out_and_what_has_waited_is_not() -> None:
    now_s = 100.0
    times = StepTimes(prefill_floor_ms=0.0, prefill_token_ms=1.0, prefill_pair_ms=0.0)
    ledger = LoadLedger(16, 300.0, clock=lambda: now_s, times=times)
    worker = ("d", 1)
    ledger.report(worker, WorkerLoad())
    ledger.charge("old book", worker, None, 1000, 1000)
    now_s += 0.9 / AGING
    ledger.charge("book", worker, None, 1000, 1000)
    ledger.charge("note", worker, None, 50, 50)
    assert ledger.columns((worker,))[0, QUEUED_TOKENS] == 2050
    assert ledger.columns_before((worker,), 200)[0, QUEUED_TOKENS] == 1050, "its waiting counts as 0.9 s of work"
    assert ledger.columns_before((worker,), 50)[0, QUEUED_TOKENS] == 50
    assert ledger.columns_before((worker,), 1000)[0, QUEUED_TOKENS] == 2050
    assert ledger.columns((worker,))[0, QUEUED_TOKENS] == 2050, "and nothing is forgotten"
