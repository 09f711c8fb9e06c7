"""One worker's load: what was charged against what was reported."""

import math

import pytest

from baton_proto.discovery import WorkerLoad
from router.workers.account import FREEING_S, NO_LIMIT, NOTHING, REPORT_DELAY_S, Account, Totals

LATER_S = 100.0


def account() -> Account:
    return Account(("worker", 1))


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


def test_another_routers_new_prompt_counts_like_ours_and_a_finished_one_does_not() -> None:
    books = account()
    books.take_report(WorkerLoad(queued_prefill_tokens=100), LATER_S)
    books.set_foreign("b", Totals(1, 500, 0, prefill_pairs=7))
    assert books.view()[1::2] == (500, 7)
    books.set_foreign("b", Totals(1, 200, 0, prefill_pairs=3))
    assert books.view()[1::2] == (200, 3)
    assert books.own == NOTHING


def left_after_two_periods(books: Account) -> None:
    """Two reports that know everything and say that nothing is queued."""
    for step in (1, 2):
        books.take_report(WorkerLoad(), LATER_S + step)


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
    books.set_foreign("b", Totals(1, 400, 0, prefill_pairs=40))
    assert books.view()[1::2] == (0, 0), "what it charged less is not new"
    books.set_foreign("b", Totals(1, 600, 0, prefill_pairs=60))
    assert books.view()[1::2] == (200, 20)


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
