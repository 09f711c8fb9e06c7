"""Who runs when: by hand for the rules, at random for the promises (exact, within budget, nobody starves)."""

import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.core.prefill_budget import share_out
from engine.core.scheduler import LOOK_AHEAD, DeadEnd, Scheduler
from engine.core.timed_steps import TimedSteps
from engine.sequences.batch import Batch
from engine.sequences.sequence import Sequence, SequenceStatus
from tests.engine.kv_oracle import (
    EventReplica,
    FakeRunner,
    make_engine,
    make_sequence,
    next_token,
    sequential_answer,
    snapshot,
)


def make_scheduler(num_blocks: int, *, max_batch_tokens: int = 64, max_running: int = 8) -> Scheduler:
    manager = BlockManager(num_blocks, 4)
    return Scheduler(manager, max_batch_tokens=max_batch_tokens, max_running=max_running)


def step(scheduler: Scheduler) -> Batch:
    """Schedules and pretends that the model ran; every sampled token is a fresh one."""
    batch = scheduler.schedule()
    for item in batch.items:
        item.sequence.num_computed_tokens = item.end
        scheduler.block_manager.commit(item.sequence)
        if item.sample:
            item.sequence.token_ids.append(1000 + item.sequence.num_tokens)
    assert scheduler.check_integrity() == []
    assert scheduler.block_manager.check_integrity() == []
    return batch


def names(batch: Batch) -> tuple[list[str], list[str]]:
    prefill, decode = ([item.sequence.request_id for item in items] for items in (batch.prefill, batch.decode))
    return prefill, decode


def distinct(name: str, length: int, **options: int) -> Sequence:
    return make_sequence(name, [ord(name[0]) * 100 + i for i in range(length)], **options)


def test_decodes_get_the_budget_before_prompt_chunks() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    scheduler.add(distinct("a", 4))
    scheduler.add(distinct("b", 4))
    assert names(step(scheduler)) == (["a", "b"], [])
    scheduler.add(distinct("c", 20))
    batch = step(scheduler)
    assert names(batch) == (["c"], ["a", "b"])
    assert [item.num_tokens for item in batch.items] == [6, 1, 1]
    assert [item.sample for item in batch.items] == [False, True, True]


def test_higher_priority_overtakes_a_prompt_that_is_under_way() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    scheduler.add(distinct("a", 20))
    step(scheduler)
    scheduler.add(distinct("late", 6))
    scheduler.add(distinct("urgent", 6, priority=1))
    batch = step(scheduler)
    assert names(batch) == (["urgent", "a"], [])
    assert [item.num_tokens for item in batch.prefill] == [6, 2]


def test_a_much_shorter_prompt_slips_in_beside_a_long_one_that_keeps_a_quarter_of_each_step() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    scheduler.add(distinct("long", 60))
    step(scheduler)
    scheduler.add(distinct("short", 7))
    batch = step(scheduler)
    assert names(batch) == (["long", "short"], [])
    assert [item.num_tokens for item in batch.prefill] == [2, 6]
    batch = step(scheduler)
    assert [item.num_tokens for item in batch.prefill] == [7, 1], "what the short one leaves is the long one's"
    assert [item.sample for item in batch.prefill] == [False, True]


def test_prompts_that_are_alike_come_one_after_the_other_so_that_the_second_finds_what_the_first_computed() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    shared = list(range(500, 524))
    scheduler.add(make_sequence("a", [*shared, 1, 2]))
    step(scheduler)
    second = make_sequence("b", [*shared, 3])
    scheduler.add(second)
    while second.status is SequenceStatus.WAITING:
        step(scheduler)
    assert second.num_cached_tokens >= 20


def test_a_short_prompt_whose_prefix_is_cached_counts_as_short() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    shared = list(range(500, 540))
    scheduler.add(make_sequence("a", [*shared, 1], max_tokens=1))
    while scheduler.queued_prefill != (0, 0):
        step(scheduler)
    scheduler.add(distinct("long", 60))
    step(scheduler)
    scheduler.add(make_sequence("b", [*shared, 2]))
    assert names(step(scheduler))[0] == ["long", "b"]


def steps_of(ms_per_token: float) -> TimedSteps:
    took = TimedSteps()
    took.note(1000, 0, 0, 1000 * ms_per_token)
    return took


def test_a_prompt_that_would_be_late_goes_before_those_that_came_first() -> None:
    scheduler = make_scheduler(256, max_batch_tokens=64)
    scheduler.add(distinct("first", 200))
    scheduler.add(distinct("second", 150))
    step(scheduler)
    urgent, took = distinct("urgent", 128), steps_of(1.0)
    urgent.due_s = 0.15
    scheduler.add(urgent)
    scheduler.look_ahead(0.0, took)
    assert [(item.sequence.request_id, item.num_tokens) for item in step(scheduler).prefill] == [
        ("first", 2),
        ("urgent", 62),
    ]
    urgent.due_s = 10.0
    scheduler.look_ahead(0.1, took)
    assert [item.num_tokens for item in step(scheduler).prefill if item.sequence.request_id == "first"] == [16]


def test_a_prompt_in_danger_may_be_the_only_one_that_waits() -> None:
    scheduler = make_scheduler(256, max_batch_tokens=64)
    urgent, took = distinct("urgent", 128), steps_of(1.0)
    urgent.due_s = 0.15
    scheduler.add(urgent)
    scheduler.look_ahead(0.0, took)
    assert names(step(scheduler))[0] == ["urgent"]


@pytest.mark.parametrize("seed", range(20))
def test_prompts_come_to_their_ends_whichever_first_tokens_are_due(seed: int) -> None:
    source, took = random.Random(seed), steps_of(1.0)
    scheduler = make_scheduler(64, max_batch_tokens=source.choice([8, 64]), max_running=source.choice([1, 2, 16]))
    left, now_s = {f"{number}": source.randint(1, 120) for number in range(40)}, 0.0
    coming = list(left.items())
    for _ in range(3000):
        while coming and (source.random() < 0.3 or not scheduler.has_work):
            name, length = coming.pop()
            first = 1000 * source.choice([int(name), 0])  # some begin alike
            sequence = make_sequence(name, range(first, first + length), max_tokens=1)
            sequence.due_s = now_s + source.choice([-1.0, 0.02, 0.2, 2.0, math.inf])
            scheduler.add(sequence)
        scheduler.look_ahead(now_s, took)
        for item in step(scheduler).prefill:
            now_s += item.num_tokens / 1e3
            if item.sample:
                scheduler.finish(item.sequence)
                del left[item.sequence.request_id]
        if not left:
            return
    raise AssertionError(f"did not come to an end: {left}")


@pytest.mark.parametrize("max_running", [1, 2, 4])
def test_prompts_in_danger_leave_a_place_for_the_first_one_that_waits(max_running: int) -> None:
    """However many come: each would take the place that another one leaves."""
    scheduler = make_scheduler(1024, max_batch_tokens=64, max_running=max_running)
    patient, took, now_s = distinct("patient", 100), steps_of(1.0), 0.0
    scheduler.add(patient)
    numbers = itertools.count()
    for _ in range(300):
        while len(scheduler.waiting) < 10:
            urgent = distinct(f"{chr(200 + next(numbers))}", 32)
            urgent.due_s = now_s + 0.1
            scheduler.add(urgent)
        scheduler.look_ahead(now_s, took)
        for item in step(scheduler).prefill:
            now_s += item.num_tokens / 1e3
            if item.sample and item.sequence is not patient:
                scheduler.finish(item.sequence)
        if patient.num_computed_tokens >= 100:
            return
    raise AssertionError(f"{patient.num_computed_tokens} of its 100 tokens are computed")


def test_prompts_in_danger_take_the_last_place_too_while_an_earlier_one_runs() -> None:
    scheduler, took = make_scheduler(1024, max_batch_tokens=64, max_running=2), steps_of(1.0)
    scheduler.add(distinct("running", 60))
    step(scheduler)
    scheduler.add(distinct("waiting", 60))
    urgent = distinct("urgent", 60)
    urgent.due_s = 0.07
    scheduler.add(urgent)
    scheduler.look_ahead(0.0, took)
    assert names(step(scheduler)) == (["urgent"], ["running"])


def test_a_prompt_that_is_late_anyway_goes_last_and_still_comes_to_an_end() -> None:
    scheduler = make_scheduler(256, max_batch_tokens=64)
    late, took = distinct("late", 100), steps_of(1.0)
    late.due_s = 0.05
    scheduler.add(late)
    scheduler.add(distinct("other", 100))
    computed: list[tuple[str, int]] = []
    while late.num_computed_tokens < 100:
        scheduler.look_ahead(0.0, took)
        computed += [(item.sequence.request_id, item.num_tokens) for item in step(scheduler).prefill]
    assert computed[:2] == [("late", 2), ("other", 62)]
    assert sum(tokens for name, tokens in computed if name == "other") == 100


def test_a_late_prompt_comes_to_its_end_however_many_newcomers_are_in_time() -> None:
    scheduler = make_scheduler(1024, max_batch_tokens=64)
    scheduler.add(distinct("running", 60))
    step(scheduler)
    late, took = distinct("late", 100), steps_of(1.0)
    late.due_s = 0.05
    scheduler.add(late)
    newcomers = (
        make_sequence(f"{first}", range(first, first + 40), max_tokens=1) for first in itertools.count(1000, 40)
    )
    for _ in range(300):
        while len(scheduler.waiting) < 30:
            scheduler.add(next(newcomers))
        scheduler.look_ahead(0.0, took)
        for sequence in [item.sequence for item in step(scheduler).prefill if item.sample]:
            if sequence is not late:
                scheduler.finish(sequence)
        if late.num_computed_tokens >= 100:
            return
    raise AssertionError(f"{late.num_computed_tokens} of its 100 tokens are computed")


def test_an_answer_that_has_begun_is_not_late_when_it_waits_again() -> None:
    scheduler = make_scheduler(512, max_batch_tokens=64)
    for number in range(12):
        scheduler.add(distinct(f"other {number}", 40))
    begun, took = distinct("begun", 20), steps_of(1.0)
    begun.num_prompt_tokens -= 1  # its last token is of the answer
    for sequence, due_s in [(begun, 0.001), *[(other, 100.0) for other in scheduler.waiting]]:
        sequence.due_s = due_s
    scheduler.add(begun)
    scheduler.look_ahead(5.0, took)
    assert begun not in scheduler._dated.late
    assert scheduler._dated.late == []


def test_a_prompt_in_danger_waits_for_the_one_that_computes_its_beginning() -> None:
    scheduler = make_scheduler(512, max_batch_tokens=64)
    shared, took = list(range(1000, 1800)), steps_of(1.0)
    scheduler.add(make_sequence("first", [*shared, 1], max_tokens=1))
    step(scheduler)
    urgent = make_sequence("urgent", [*shared, 2], max_tokens=1)
    urgent.due_s = 1.0
    scheduler.add(urgent)
    scheduler.look_ahead(0.0, took)
    assert names(step(scheduler))[0] == ["first"]


def siblings(count: int, *, shared: int, own: int) -> list[Sequence]:
    """Each is `own` tokens longer than the one before, as calls of one agent are."""
    tokens = list(range(5000, 5000 + shared + count * own))
    return [make_sequence(f"{n}", tokens[: shared + n * own], max_tokens=1) for n in range(1, count + 1)]


def test_siblings_are_not_late_because_their_beginning_is_computed_once() -> None:
    scheduler, took = make_scheduler(2048, max_batch_tokens=64), steps_of(1.0)
    calls = siblings(2 * LOOK_AHEAD, shared=400, own=80)
    for call in calls:
        call.due_s = 2.1  # computed apart, they take 17.3 s; together 1.7 s
        scheduler.add(call)
    now_s, ends = 0.0, []
    while len(ends) < len(calls):
        scheduler.look_ahead(now_s, took)
        assert scheduler._dated.late == []
        batch = step(scheduler)
        now_s += sum(item.num_tokens for item in batch.prefill) / 1e3
        for item in batch.prefill:
            if item.sample:
                ends.append(now_s)
                scheduler.finish(item.sequence)
    assert max(ends) <= 2.1


def test_prompts_that_begin_like_a_late_one_and_are_as_late_wait_for_it_and_take_no_step_from_others() -> None:
    scheduler, took = make_scheduler(8000, max_batch_tokens=1000, max_running=16), TimedSteps()
    took.note(1000, 0, 0, 100.0)
    common = list(range(12_000))  # they take 1.2 s without attention
    for place in range(4):
        sibling = make_sequence(f"s{place}", [*common, *[20_000 + place] * 100], prefill_only=True)
        sibling.due_s = 0.5 + place / 100
        scheduler.add(sibling)
    other = distinct("o", 4000)
    other.due_s = 0.7
    scheduler.add(other)
    now_s = 0.0
    while other.num_computed_tokens < 4000:
        scheduler.look_ahead(now_s, took)
        assert len(step(scheduler).prefill) <= 2  # the first one keeps its place
        now_s += 0.1
    assert now_s < other.due_s
    assert [one.num_computed_tokens for one in scheduler.waiting] == [0, 0, 0]


@pytest.mark.parametrize(
    ("due_s", "other_tokens"), [(0.8, 400), (1.1, 1)], ids=["in danger, before another", "with time to spare"]
)
def test_nobody_whose_first_token_is_due_waits_for_a_prompt_that_is_late(due_s: float, other_tokens: int) -> None:
    scheduler, took = make_scheduler(512, max_batch_tokens=64), steps_of(1.0)
    late, urgent = siblings(2, shared=400, own=80)
    late.due_s, urgent.due_s = 0.05, due_s
    scheduler.add(late)
    step(scheduler)
    scheduler.add(distinct("other", other_tokens))
    scheduler.add(urgent)
    scheduler.look_ahead(0.1, took)
    assert scheduler._dated.late == [late]
    assert {"1", "2"} <= set(names(step(scheduler))[0])
    assert late.num_computed_tokens == 64 + 2, "what the first of the others has beside prompts in danger"


def test_what_slips_in_leaves_the_memory_for_those_whom_it_passes() -> None:
    scheduler = make_scheduler(16, max_batch_tokens=8)
    scheduler.add(distinct("long", 36))
    step(scheduler)
    scheduler.add(distinct("next", 24))
    scheduler.add(distinct("short", 6))
    assert names(step(scheduler))[0] == ["long"], "7 blocks are free, 6 of them for the next, and it needs 2"
    scheduler.add(distinct("tiny", 3))
    assert names(step(scheduler))[0] == ["long", "tiny"]


def test_a_short_prompt_does_not_slip_in_beside_one_of_higher_priority() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    scheduler.add(distinct("urgent", 60, priority=1))
    step(scheduler)
    scheduler.add(distinct("short", 4))
    batch = step(scheduler)
    assert names(batch) == (["urgent"], [])
    assert [item.num_tokens for item in batch.prefill] == [8]


@given(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_a_step_is_used_up_the_first_has_its_quarter_and_of_the_rest_the_shortest_comes_first(
    budget: int, left: list[int]
) -> None:
    shares = share_out(budget, left)
    assert sum(shares) == min(budget, sum(left))
    assert all(0 <= share <= rest for share, rest in zip(shares, left, strict=True))
    assert shares[0] >= min(left[0], budget // 4)
    others = sorted(range(1, len(left)), key=lambda i: (left[i], i))
    for shorter, longer in itertools.pairwise(others):
        assert shares[longer] == 0 or shares[shorter] == left[shorter]


def test_no_more_than_max_running_start() -> None:
    scheduler = make_scheduler(64, max_running=2)
    for name in "abc":
        scheduler.add(distinct(name, 4))
    assert names(step(scheduler)) == (["a", "b"], [])
    scheduler.finish(next(iter(scheduler.running)))
    assert names(step(scheduler)) == (["c"], ["b"])


def test_the_first_in_order_decode_when_more_were_admitted_than_may_run() -> None:
    scheduler = make_scheduler(64, max_running=2)
    for name in "abc":
        sequence = distinct(name, 4)
        assert scheduler.reserve(sequence)
        sequence.num_computed_tokens = 4
        sequence.token_ids.append(1)
        scheduler.admit(sequence)
    assert names(step(scheduler)) == ([], ["a", "b"])


def test_a_decode_without_a_block_preempts_the_last_arrival() -> None:
    scheduler = make_scheduler(6)
    for name in "ab":
        scheduler.add(distinct(name, 8))
    step(scheduler)
    scheduler.add(distinct("c", 3))
    assert names(step(scheduler)) == ([], ["a", "b"])  # c would take what a and b need soon
    for _ in range(3):
        step(scheduler)
    a, b = scheduler.running
    assert scheduler.block_manager.num_available == 0
    assert names(step(scheduler)) == ([], ["a"])
    assert (a.status, b.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    assert scheduler.waiting[0] is b  # before c, which arrived later
    assert (b.num_preemptions, scheduler.num_preemptions) == (1, 1)


def test_priority_is_preempted_last() -> None:
    scheduler = make_scheduler(6)
    scheduler.add(distinct("low", 8))
    scheduler.add(distinct("high", 8, priority=1))
    for _ in range(6):
        step(scheduler)
    assert [sequence.request_id for sequence in scheduler.running] == ["high"]


def test_a_preempted_sequence_recomputes_only_what_was_evicted() -> None:
    scheduler = make_scheduler(6)
    a, b = distinct("a", 8), distinct("b", 8)
    scheduler.add(a)
    scheduler.add(b)
    for _ in range(6):
        step(scheduler)
    assert b.status is SequenceStatus.WAITING
    scheduler.finish(a)
    batch = step(scheduler)
    assert names(batch) == (["b"], [])
    assert batch.prefill[0].start == 8  # only the deepest block had to be given up
    assert b.num_cached_tokens == 0  # the first allocation counts


def test_prefill_only_sequences_are_never_preempted() -> None:
    scheduler = make_scheduler(7)
    a, p = distinct("a", 8), distinct("p", 12, prefill_only=True)
    scheduler.add(a)
    step(scheduler)
    scheduler.max_batch_tokens = 2  # so that p stays under way for long
    scheduler.add(p)
    while scheduler.block_manager.blocks_for(a.num_tokens) <= 4:
        assert names(step(scheduler)) == (["p"], ["a"])
    assert scheduler.block_manager.num_available == 0
    assert names(step(scheduler)) == (["p"], [])  # a pauses
    assert p.is_prefilling
    assert a.num_preemptions == p.num_preemptions == 0


def test_a_decode_pauses_while_remote_sequences_hold_the_pool() -> None:
    scheduler = make_scheduler(4)
    scheduler.add(distinct("a", 4))
    step(scheduler)
    step(scheduler)
    assert not scheduler.reserve(distinct("large", 8))  # it would leave nothing for a
    held = distinct("r", 4)
    assert scheduler.reserve(held)
    for _ in range(20):
        step(scheduler)
    [a] = scheduler.running
    assert a.num_tokens == 13
    assert len(a.block_table) == 3
    assert step(scheduler).num_tokens == 0
    assert a.num_preemptions == 0
    scheduler.finish(held)
    assert names(step(scheduler)) == ([], ["a"])


def test_reservations_do_not_overtake_an_earlier_sequence_that_waits_for_memory() -> None:
    scheduler = make_scheduler(8)
    running = distinct("a", 16)
    assert scheduler.reserve(running)
    scheduler.add(distinct("big", 24))
    step(scheduler)
    small = distinct("small", 4)
    assert not scheduler.reserve(small)
    scheduler.finish(running)
    assert not scheduler.reserve(small)
    assert names(step(scheduler)) == (["big"], [])
    assert scheduler.reserve(small)


def test_a_reservation_keeps_its_turn_while_it_is_asked_again() -> None:
    scheduler = make_scheduler(8)
    running = distinct("a", 24)
    assert scheduler.reserve(running)
    early = distinct("early", 16)
    assert not scheduler.reserve(early)
    scheduler.add(distinct("late", 16))
    step(scheduler)
    scheduler.finish(running)
    assert scheduler.reserve(early)


def test_reservations_go_on_when_the_starved_sequence_was_aborted() -> None:
    scheduler = make_scheduler(8)
    assert scheduler.reserve(distinct("a", 16))
    big = distinct("big", 24)
    scheduler.add(big)
    step(scheduler)
    scheduler.finish(big)
    assert scheduler.reserve(distinct("small", 4))


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_step_has_room_for_a_token_and_a_sequence_at_least() -> None:
    manager = BlockManager(4, 4)
    Scheduler(manager, max_batch_tokens=1, max_running=1)
    for max_batch_tokens, max_running in ((0, 1), (1, 0)):
        with pytest.raises(AssertionError):
            Scheduler(manager, max_batch_tokens=max_batch_tokens, max_running=max_running)


def test_a_prompt_may_fill_the_pool_and_a_longer_one_is_refused_with_the_reason() -> None:
    scheduler = make_scheduler(3)
    whole, long = distinct("whole", 12), distinct("long", 13)
    scheduler.add(long)
    assert long.status is SequenceStatus.FINISHED
    assert scheduler.has_work
    problem = "13 tokens do not fit into the KV pool of 12"
    assert scheduler.take_dead_ends() == [DeadEnd(long, "error", problem)]
    assert scheduler.take_dead_ends() == []
    assert not scheduler.has_work
    scheduler.add(whole)
    assert names(step(scheduler)) == (["whole"], [])


def test_an_answer_that_outgrows_the_pool_ends_there_and_gives_its_blocks_back() -> None:
    scheduler = make_scheduler(2)
    sequence = distinct("a", 8)
    scheduler.add(sequence)
    assert names(step(scheduler)) == (["a"], [])
    assert sequence.num_tokens == 9
    assert step(scheduler).num_tokens == 0
    assert scheduler.take_dead_ends() == [DeadEnd(sequence, "length", None)]
    assert sequence.status is SequenceStatus.FINISHED
    assert not scheduler.running
    assert scheduler.block_manager.num_available == 2


def test_a_step_of_one_token_serves_a_prompt_and_then_its_answer() -> None:
    scheduler = make_scheduler(8, max_batch_tokens=1)
    scheduler.add(distinct("a", 2))
    scheduler.add(distinct("b", 2))
    assert [names(step(scheduler)) for _ in range(4)] == [(["a"], []), (["a"], []), ([], ["a"]), ([], ["a"])]
    assert [sequence.request_id for sequence in scheduler.waiting] == ["b"]


def test_no_more_sequences_decode_than_a_step_has_tokens_and_no_prompt_starts_beside_them() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=12)
    for name in "abc":
        scheduler.add(distinct(name, 4))
    assert names(step(scheduler)) == (["a", "b", "c"], [])
    scheduler.max_batch_tokens = 2
    scheduler.add(distinct("d", 4))
    assert names(step(scheduler)) == ([], ["a", "b"])
    assert [sequence.request_id for sequence in scheduler.waiting] == ["d"]


def test_a_prompt_that_fills_the_step_alone_lets_no_equal_one_start() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    scheduler.add(distinct("a", 8))
    scheduler.add(distinct("b", 8))
    assert names(step(scheduler)) == (["a"], [])
    assert [sequence.request_id for sequence in scheduler.running] == ["a"]


def test_a_prompt_starts_when_the_one_before_it_leaves_a_single_token_of_the_step() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    scheduler.add(distinct("a", 7))
    scheduler.add(distinct("b", 8))
    assert [item.num_tokens for item in step(scheduler).prefill] == [7, 1]


@pytest.mark.parametrize(("num_blocks", "fits"), [(3, True), (4, False)])
@pytest.mark.parametrize("remote", [False, True])
def test_a_newcomer_leaves_one_block_for_each_decoding_sequence_and_not_more(
    num_blocks: int, fits: bool, remote: bool
) -> None:
    scheduler = make_scheduler(9)
    for name in "ab":
        scheduler.add(distinct(name, 7))
    step(scheduler)
    assert scheduler.block_manager.num_available == 5
    newcomer = distinct("newcomer", 4 * num_blocks)
    if remote:
        assert scheduler.reserve(newcomer) is fits
    else:
        scheduler.add(newcomer)
        assert names(step(scheduler)) == (["newcomer"] if fits else [], ["a", "b"])


def test_only_the_first_of_those_who_wait_may_slip_in() -> None:
    scheduler = make_scheduler(256, max_batch_tokens=8, max_running=64)
    scheduler.add(distinct("0", 100))
    step(scheduler)
    for number in range(LOOK_AHEAD):
        scheduler.add(distinct(chr(ord("a") + number), 80))
    last = distinct("z", 3)
    scheduler.add(last)
    assert names(step(scheduler)) == (["0"], [])
    scheduler.finish(scheduler.waiting[0])
    assert names(step(scheduler)) == (["0", "z"], [])


def test_a_prompt_decodes_while_an_earlier_one_is_still_under_way() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    scheduler.add(distinct("long", 60))
    step(scheduler)
    scheduler.add(distinct("short", 5))
    assert names(step(scheduler)) == (["long", "short"], [])
    assert names(step(scheduler)) == (["long"], ["short"])


def test_each_preemption_is_counted_for_the_sequence_and_in_all() -> None:
    scheduler = make_scheduler(8)
    winner, loser = distinct("a", 8), distinct("b", 8)
    scheduler.add(winner)
    scheduler.add(loser)
    assert names(step(scheduler)) == (["a", "b"], [])
    for times in (1, 2):
        while loser.status is not SequenceStatus.WAITING:
            assert step(scheduler).num_tokens > 0
        assert (loser.num_preemptions, scheduler.num_preemptions) == (times, times)
        scheduler.finish(winner)
        winner = distinct("c", 8, priority=1)
        assert names(step(scheduler)) == (["b"], [])
        scheduler.add(winner)


def test_a_sequence_keeps_the_place_of_its_first_arrival() -> None:
    scheduler = make_scheduler(8)
    first, second = distinct("first", 4), distinct("second", 4)
    for sequence in (first, second, first):
        scheduler._stamp(sequence)
    assert (first.arrival, second.arrival) == (0, 1)


def test_the_end_of_another_waiting_sequence_leaves_the_starved_one_its_turn() -> None:
    scheduler = make_scheduler(8)
    assert scheduler.reserve(distinct("a", 16))
    scheduler.add(distinct("big", 24))
    other = distinct("other", 4)
    scheduler.add(other)
    step(scheduler)
    scheduler.finish(other)
    assert not scheduler.reserve(distinct("small", 4))


@pytest.mark.parametrize(("pinned", "in_flight", "held"), [(False, 0, 0), (True, 0, 1), (False, 1, 1), (True, 1, 1)])
def test_a_finished_sequence_keeps_its_blocks_while_a_reader_or_a_step_uses_them(
    pinned: bool, in_flight: int, held: int
) -> None:
    scheduler = make_scheduler(8)
    sequence = distinct("a", 4)
    scheduler.add(sequence)
    batch = scheduler.schedule()
    assert names(batch) == (["a"], [])
    sequence.pinned, sequence.num_in_flight_tokens = pinned, in_flight
    scheduler.finish(sequence)
    assert len(sequence.block_table) == held
    assert scheduler.check_integrity() == []
    sequence.pinned, sequence.num_in_flight_tokens = False, 0
    scheduler.release(sequence)
    assert sequence.block_table == []


def test_the_work_that_is_queued_is_what_waits_and_what_is_left_of_the_prompts_under_way() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    assert scheduler.queued_prefill == (0, 0)
    scheduler.add(distinct("a", 20))
    scheduler.add(distinct("b", 11))
    assert scheduler.queued_prefill == (31, 200 + 60)
    step(scheduler)
    assert scheduler.queued_prefill == (12 + 11, (400 - 64) // 2 + 60)


# --- the check of the queues ------------------------------------------------------------------------------------------


def queues() -> Scheduler:
    """`a` decodes, `b` is a prompt under way, `c` waits, `r` is remote, and a reader keeps the blocks of `p`."""
    scheduler = make_scheduler(64, max_batch_tokens=8)
    a, p = distinct("a", 4), distinct("p", 4, prefill_only=True, pinned=True)
    for sequence in (a, p):
        scheduler.add(sequence)
    step(scheduler)
    scheduler.finish(p)
    assert scheduler.reserve(distinct("r", 4))
    for name in "bc":
        scheduler.add(distinct(name, 20))
        step(scheduler)
    return scheduler


def test_the_queues_of_the_check_are_sound() -> None:
    scheduler = queues()
    assert [sequence.request_id for sequence in scheduler.running] == ["a", "b"]
    assert [sequence.request_id for sequence in scheduler.waiting] == ["c"]
    assert [sequence.request_id for sequence in scheduler.block_manager.holders] == ["a", "p", "r", "b"]
    assert scheduler.check_integrity() == []


def end_pin(scheduler: Scheduler) -> None:
    scheduler.block_manager.holders[1].pinned = False


def give_blocks(scheduler: Scheduler) -> None:
    assert scheduler.block_manager.allocate(scheduler.waiting[0])


@pytest.mark.parametrize(
    ("damage", "problems"),
    [
        (
            lambda scheduler: setattr(scheduler.waiting[0], "status", SequenceStatus.REMOTE),
            ["<Sequence c remote computed 0/20 blocks 0> is in the waiting queue"],
        ),
        (
            give_blocks,
            [
                "<Sequence c waiting computed 0/20 blocks 5> is in the waiting queue",
                "<Sequence c waiting computed 0/20 blocks 5> holds blocks",
            ],
        ),
        (
            lambda scheduler: setattr(scheduler.running[0], "status", SequenceStatus.REMOTE),
            ["<Sequence a remote computed 6/7 blocks 2> is among the running"],
        ),
        (
            lambda scheduler: setattr(scheduler.running[0], "block_table", []),
            ["<Sequence a running computed 6/7 blocks 0> is among the running"],
        ),
        (
            lambda scheduler: scheduler.running[0].token_ids.append(1),
            ["<Sequence a running computed 6/8 blocks 2> decodes with 8 tokens"],
        ),
        (
            lambda scheduler: setattr(scheduler, "_waiting_tokens", 21),
            ["21 waiting tokens are not the sum over the waiting queue"],
        ),
        (
            lambda scheduler: setattr(scheduler, "_waiting_pairs", 201),
            ["201 waiting pairs are not the sum over the waiting queue"],
        ),
        (
            end_pin,
            ["<Sequence p finished computed 4/5 blocks 1> holds blocks"],
        ),
    ],
)
def test_the_check_tells_what_is_wrong_with_the_queues(
    damage: Callable[[Scheduler], object], problems: list[str]
) -> None:
    scheduler = queues()
    damage(scheduler)
    assert scheduler.check_integrity() == problems


# --- anything at all --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Request:
    kind: str  # "local" | "remote" | "prefill" (pinned)
    prompt: list[int]
    max_tokens: int
    priority: int
    arrives: int  # step
    delay: int  # steps of the transfer, or of the readers of pinned blocks
    aborted_after: int | None  # steps

    @property
    def most_tokens(self) -> int:
        return len(self.prompt) + (1 if self.kind == "prefill" else self.max_tokens)


requests = st.builds(
    Request,
    kind=st.sampled_from(["local", "local", "remote", "remote", "prefill"]),
    prompt=st.tuples(st.sampled_from([0, 0, 5, 9]), st.lists(st.integers(0, 2), min_size=1, max_size=6)).map(
        lambda parts: list(range(parts[0])) + parts[1]
    ),
    max_tokens=st.integers(1, 14),
    priority=st.sampled_from([0, 0, 0, 1]),
    arrives=st.integers(0, 12),
    delay=st.integers(0, 5),
    aborted_after=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 10)),
)


@dataclass(slots=True)
class Cluster:
    """Plays the workers around one engine: transfers that take time, pinned blocks, aborts. Checks after every step."""

    engine: Engine
    runner: FakeRunner
    replica: EventReplica = field(default_factory=EventReplica)
    outputs: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    finish: dict[str, str] = field(default_factory=dict)
    pending: list[tuple[int, Request, Sequence]] = field(default_factory=list)  # not reserved yet
    transfers: list[tuple[int, Request, Sequence]] = field(default_factory=list)  # (step when it is done, ...)
    pinned: list[tuple[int, Sequence]] = field(default_factory=list)
    sources: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict)  # what a transfer reads, and where
    aborts: list[tuple[int, str]] = field(default_factory=list)

    def arrive(self, now: int, name: str, request: Request) -> Sequence:
        prefill_only = request.kind == "prefill"
        sequence = make_sequence(
            name,
            request.prompt,
            max_tokens=request.max_tokens,
            priority=request.priority,
            prefill_only=prefill_only,
            pinned=prefill_only,
        )
        if request.kind == "remote":
            self.pending.append((now, request, sequence))
        else:
            self.engine.add(sequence)
        if request.aborted_after is not None:
            self.aborts.append((now + request.aborted_after, name))
        return sequence

    def before_step(self, now: int) -> None:
        for due, name in list(self.aborts):
            if due <= now:
                self.aborts.remove((due, name))
                self.abort(now, name)
        for entry in list(self.transfers):
            if entry[0] <= now:
                self.transfers.remove(entry)
                self.complete(entry[1], entry[2])
        for entry in list(self.pending):
            if self.engine.reserve(entry[2]):
                self.pending.remove(entry)
                self.transfers.append((now + entry[1].delay, entry[1], entry[2]))
        for due, sequence in list(self.pinned):
            if due <= now:
                self.pinned.remove((due, sequence))
                self.unpin(sequence)

    def abort(self, now: int, name: str) -> None:
        sequence = self.engine.abort(name)
        if sequence is not None:
            self.finish[name] = "aborted"
            if sequence.pinned:
                self.pinned.append((now + 2, sequence))
        for entry in self.pending:
            if entry[2].request_id == name:
                self.pending.remove(entry)
                self.finish[name] = "aborted"
                break

    def complete(self, request: Request, sequence: Sequence) -> None:
        """The transfer is done: blocks are written now, at the latest moment, and must still be this sequence's own."""
        if request.aborted_after == 0:
            self.engine.release(sequence)
            self.finish[sequence.request_id] = "aborted"
            return
        start = sequence.num_computed_tokens
        self.runner.slab.write(sequence.block_table, sequence.token_ids, start, sequence.num_tokens)
        self.runner.slab.check(sequence.block_table, sequence.token_ids, sequence.num_tokens)
        self.take(self.engine.admit(sequence, next_token(sequence.token_ids), None), 0)

    def unpin(self, sequence: Sequence) -> None:
        for at, value in self.sources.pop(sequence.request_id, {}).items():
            assert self.runner.slab.values[at] == value, "a block changed under its reader"
        self.engine.unpin(sequence)

    def read_sources(self, batch: Batch, layer: int) -> None:
        """From here on a transfer reads what this chunk computed, wherever it is now."""
        for item in batch.items:
            if item.sequence.pinned:
                slab, table = self.runner.slab, item.sequence.block_table
                places = [slab.at(table, position) for position in range(item.end)]
                source = self.sources.setdefault(item.sequence.request_id, {})
                for place in places:
                    source.setdefault(place, slab.values[place])

    def take(self, output, now: int) -> None:  # type: ignore[no-untyped-def]
        name = output.sequence.request_id
        assert name not in self.finish, "news after the end"
        self.outputs[name].extend(output.token_ids)
        if output.finish is not None:
            self.finish[name] = output.finish
            if output.sequence.pinned:
                self.pinned.append((now, output.sequence))

    def step(self, now: int, delay_of: dict[str, int]) -> None:
        self.before_step(now)
        num_batches = len(self.runner.batches)
        result = self.engine.step()
        for output in result.outputs:
            self.take(output, now + delay_of[output.sequence.request_id])
        self.replica.apply(result.events)
        assert self.replica.parents == snapshot(self.engine.block_manager)
        assert self.engine.check_integrity() == []
        for batch in self.runner.batches[num_batches:]:
            assert batch.num_tokens <= self.engine.scheduler.max_batch_tokens
            assert len(batch.decode) <= self.engine.scheduler.max_running
            assert all(item.num_tokens == 1 and item.sample for item in batch.decode)
            assert not any(item.sequence.prefill_only for item in batch.decode)
            assert len({item.sequence.request_id for item in batch.items}) == len(batch.items)


@settings(max_examples=80, deadline=None)
@given(
    work=st.lists(requests, min_size=1, max_size=10),
    spare_blocks=st.integers(0, 8),
    max_batch_tokens=st.integers(1, 24),
    max_running=st.integers(1, 6),
    block_size=st.sampled_from([1, 2, 4]),
    depth=st.sampled_from([0, 1]),
    watched=st.booleans(),
)
def test_everything_ends_with_the_sequential_answer(
    work: list[Request],
    spare_blocks: int,
    max_batch_tokens: int,
    max_running: int,
    block_size: int,
    depth: int,
    watched: bool,
) -> None:
    num_blocks = max(-(-request.most_tokens // block_size) for request in work) + spare_blocks
    engine, runner = make_engine(
        num_blocks, block_size, max_batch_tokens=max_batch_tokens, max_running=max_running, depth=depth
    )
    cluster = Cluster(engine, runner)
    if watched:
        engine.on_batch = lambda batch: functools.partial(cluster.read_sources, batch)
    sequences: dict[str, Sequence] = {}
    delay_of = {f"r{i}": request.delay for i, request in enumerate(work)}
    for now in range(1500):
        for i, request in enumerate(work):
            if request.arrives == now:
                sequences[f"r{i}"] = cluster.arrive(now, f"r{i}", request)
        cluster.step(now, delay_of)
        if len(cluster.finish) == len(work) and not cluster.pinned:
            break
    assert set(cluster.finish) == set(sequences) == set(delay_of), "somebody starved"
    for i, request in enumerate(work):
        check_answer(request, sequences[f"r{i}"], cluster)
    while engine.has_work:  # at depth 1 the last step may have been one too many
        assert engine.step().outputs == []
    assert engine.check_integrity() == []
    assert engine.block_manager.num_used == 0


def check_answer(request: Request, sequence: Sequence, cluster: Cluster) -> None:
    name = sequence.request_id
    answer = sequential_answer(request.prompt, 1 if request.kind == "prefill" else request.max_tokens)
    if cluster.finish[name] == "aborted":
        assert cluster.outputs[name] == answer[: len(cluster.outputs[name])]
        return
    assert cluster.outputs[name] == answer
    assert cluster.finish[name] in (("prefill",) if request.kind == "prefill" else ("stop", "length"))
    if sequence.num_preemptions == 0:
        expected = sequence.num_tokens - 1 - sequence.num_cached_tokens
        if request.kind == "remote":
            expected = len(answer) - 1
        surplus = cluster.runner.computed.get(name, 0) - expected
        assert surplus == 0 or (surplus == cluster.runner.depth and cluster.finish[name] == "stop"), "computed twice"
