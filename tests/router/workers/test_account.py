"""One worker's load: what was charged against what was reported."""

import math

import pytest

from baton_proto.discovery import WorkerLoad
from router.workers.account import FREEING_S, NO_LIMIT, NOTHING, REPORT_DELAY_S, Account, LoadView, Totals

LATER_S = 100.0


def account() -> Account:
    return Account(("worker", 1))


def test_a_new_account_is_empty() -> None:
    assert account().view() == LoadView(0, 0, 0, 0)
    assert account().own == NOTHING


def test_a_workers_step_began_with_its_last_report_and_before_any_at_the_clocks_zero() -> None:
    books = account()
    assert books.step_began_s == 0.0
    books.take_report(WorkerLoad(), LATER_S)
    assert books.step_began_s == LATER_S


def test_requests_and_blocks_are_the_larger_of_charge_and_report() -> None:
    books = account()
    books.requests, books.blocks = 3, 40
    assert books.view()[:3] == (3, 0, 40)
    books.take_report(WorkerLoad(running=2, waiting=2, blocks_used=30), LATER_S)
    assert books.view() == LoadView(requests=4, queued_prefill_tokens=0, active_blocks=40)
    books.take_report(WorkerLoad(running=1, waiting=1, blocks_used=50), LATER_S)
    assert books.view() == LoadView(requests=3, queued_prefill_tokens=0, active_blocks=50)


def test_other_routers_charges_are_added_to_ours() -> None:
    books = account()
    books.requests, books.blocks = 1, 10
    books.set_foreign("b", Totals(2, 0, 20))
    books.set_foreign("c", Totals(4, 0, 40))
    assert books.foreign == Totals(6, 0, 60)
    assert books.view() == LoadView(requests=7, queued_prefill_tokens=0, active_blocks=70)
    books.set_foreign("b", NOTHING)
    assert books.by_router == {"c": Totals(4, 0, 40)}
    assert books.view().requests == 5


def test_a_prompt_counts_in_full_until_a_report_may_know_it() -> None:
    books = account()
    books.tokens.charge(1000)
    books.pairs.charge(50)
    assert books.view()[1::2] == (1000, 50)
    books.take_report(WorkerLoad(), LATER_S)  # ends the first period: the prompt may be missing in it
    assert books.view()[1::2] == (1000, 50)
    books.take_report(WorkerLoad(queued_prefill_tokens=300, queued_prefill_pairs=20), LATER_S + REPORT_DELAY_S)
    assert books.view()[1::2] == (300, 20)


def test_reports_in_quick_succession_end_no_period() -> None:
    books = account()
    books.take_report(WorkerLoad(), LATER_S)
    books.tokens.charge(1000)
    for step in range(5):
        books.take_report(WorkerLoad(), LATER_S + step * REPORT_DELAY_S / 5.01)
    assert books.view().queued_prefill_tokens == 1000


def test_what_was_charged_in_this_period_is_added_to_the_report() -> None:
    books = account()
    books.tokens.charge(1000)
    books.take_report(WorkerLoad(), LATER_S)
    books.take_report(WorkerLoad(queued_prefill_tokens=300), LATER_S + 1)
    books.tokens.charge(200)
    assert books.view().queued_prefill_tokens == 500


def test_a_report_is_never_undercut() -> None:
    books = account()
    books.take_report(WorkerLoad(queued_prefill_tokens=700, queued_prefill_pairs=9), LATER_S)
    assert books.view()[1::2] == (700, 9)


def test_what_is_charged_bounds_what_a_report_may_not_know() -> None:
    books = account()
    books.tokens.charge(1000)
    books.take_report(WorkerLoad(queued_prefill_tokens=600), LATER_S)
    assert books.view().queued_prefill_tokens == 1000  # not 1,600


def test_another_routers_new_prompt_counts_like_ours_and_a_finished_one_does_not() -> None:
    books = account()
    books.take_report(WorkerLoad(queued_prefill_tokens=100), LATER_S)
    books.set_foreign("b", Totals(1, 500, 0, prefill_pairs=7))
    assert books.view()[1::2] == (500, 7)
    books.set_foreign("b", Totals(1, 200, 0, prefill_pairs=3))
    assert books.view()[1::2] == (200, 3)
    assert books.own == NOTHING


def test_our_own_totals_are_what_we_charged() -> None:
    books = account()
    books.requests, books.blocks = 2, 5
    books.tokens.charge(30)
    books.pairs.charge(4)
    books.set_foreign("b", Totals(9, 9, 9, 9))
    assert books.own == Totals(2, 30, 5, 4)


def left_after_two_periods(books: Account) -> None:
    """Two reports that know everything and say that nothing is queued."""
    for step in (1, 2):
        books.take_report(WorkerLoad(), LATER_S + step)


def test_charges_of_one_period_add_up() -> None:
    books = account()
    left_after_two_periods(books)
    books.tokens.charge(100)
    books.tokens.charge(200)
    assert books.worker == ("worker", 1)
    assert books.view().queued_prefill_tokens == 300


def test_a_period_ends_exactly_after_the_delay_of_reports() -> None:
    books = account()
    books.tokens.charge(100)
    books.take_report(WorkerLoad(), REPORT_DELAY_S)
    books.take_report(WorkerLoad(), 2 * REPORT_DELAY_S)
    assert books.view().queued_prefill_tokens == 0


def test_only_what_another_router_charged_more_is_new() -> None:
    books = account()
    books.set_foreign("b", Totals(1, 500, 0, prefill_pairs=50))
    left_after_two_periods(books)
    assert books.view()[1::2] == (0, 0)
    books.set_foreign("b", Totals(1, 600, 0, prefill_pairs=60))
    assert books.view()[1::2] == (100, 10)


def test_what_another_router_charged_less_is_not_new() -> None:
    books = account()
    books.set_foreign("b", Totals(1, 500, 0, prefill_pairs=50))
    left_after_two_periods(books)
    books.set_foreign("b", Totals(1, 400, 0, prefill_pairs=40))
    assert books.view()[1::2] == (0, 0)


def test_a_router_that_charged_nothing_may_leave() -> None:
    books = account()
    books.set_foreign("b", NOTHING)
    assert (books.foreign, books.by_router) == (NOTHING, {})


def test_blocks_come_free_as_fast_as_prompts_take_them_less_what_their_use_has_risen() -> None:
    """Each second prompts take 30 blocks, and the use rises by 10 until it stays: others have freed 20, and then 30."""
    books = account()
    for second in range(100):
        books.take_blocks(30, second)
        books.take_report(WorkerLoad(running=7, blocks_used=100 + 10 * second, blocks_total=2000), second)
        books.end_request(second)
    assert books.room(99) == (2000 - 1090, pytest.approx(1e6 / 20, rel=0.06), 1090, 7)
    for second in range(100, 200):
        books.take_blocks(30, second)
        books.take_report(WorkerLoad(running=7, blocks_used=1090, blocks_total=2000), second)
        books.end_request(second)
    assert books.room(199)[1] == pytest.approx(1e6 / 30, rel=0.06)


def test_what_a_worker_used_before_its_first_report_was_not_taken_since() -> None:
    books = account()
    books.take_report(WorkerLoad(blocks_used=90, blocks_total=100), 1.0)
    books.take_blocks(50, 1.0)
    books.end_request(1.0)
    assert books.room(1.0)[1] == FREEING_S * 1e6 / 50


def test_how_soon_a_block_comes_free_fades_and_is_unknown_when_no_request_has_ended_lately() -> None:
    books = account()
    books.take_report(WorkerLoad(blocks_used=90, blocks_total=100), 0.0)
    books.take_blocks(50, 0.0)
    assert books.room(0.0)[1] == 0, "none has ended"
    books.end_request(0.0)
    assert books.room(FREEING_S)[1] == int(FREEING_S * 1e6 / (50 / math.e))
    assert books.room(FREEING_S + 0.1)[1] == 0
    books.take_report(WorkerLoad(blocks_used=95, blocks_total=100), FREEING_S)
    books.take_report(WorkerLoad(blocks_used=100, blocks_total=100), FREEING_S)
    books.take_report(WorkerLoad(blocks_used=200, blocks_total=100), FREEING_S)
    assert books.room(FREEING_S)[1] == FREEING_S * 1e6, "where the use only rises, none is expected within that time"
    books.take_report(WorkerLoad(blocks_used=90), 0.0)
    assert books.room(FREEING_S) == (NO_LIMIT, 0, 0, 0), "it does not say how many it has"
