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
from engine.core.prefill_budget import BLIND_TOKENS, LEAST_TOKENS
from engine.core.scheduler import LOOK_AHEAD, DeadEnd, Scheduler
from engine.sequences.batch import Batch
from engine.sequences.sequence import Sequence, SequenceStatus
from runtime.config.step_times import StepTimes
from runtime.step_rule import AGING
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


def step(scheduler: Scheduler, now_s: float = 0.0) -> Batch:
    """Schedules and pretends that the model ran; every sampled token is a fresh one."""
    batch = scheduler.schedule(now_s)
    for item in batch.items:
        item.sequence.num_computed_tokens = item.end
        scheduler.block_manager.commit(item.sequence)
        if item.sample:
            item.sequence.token_ids.append(1000 + item.sequence.num_tokens)
    assert scheduler.check_integrity() == []
    assert scheduler.block_manager.check_integrity() == []
    return batch


SLOW = StepTimes(0.0, 1.0, 0.0, 0.0, 1.0, 0.0)  # a token of a prompt or of an answer takes a ms


def due(sequence: Sequence, due_s: float) -> Sequence:
    sequence.due_s = due_s
    return sequence


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
    assert names(batch) == (["urgent", "late"], [])
    assert [item.num_tokens for item in batch.prefill] == [6, 2]


def test_a_shorter_prompt_goes_before_a_long_one_that_is_under_way() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    scheduler.add(distinct("long", 60))
    step(scheduler)
    scheduler.add(distinct("short", 7))
    batch = step(scheduler)
    assert [(item.sequence.request_id, item.num_tokens, item.sample) for item in batch.prefill] == [
        ("short", 7, True),
        ("long", 1, False),
    ]


def test_a_prompt_that_has_waited_goes_before_shorter_ones_that_come_later() -> None:
    scheduler = make_scheduler(1024, max_batch_tokens=64)
    scheduler.budget.times = SLOW
    long = due(distinct("long", 300), 1.0)
    scheduler.add(long)
    newcomers, now_s = itertools.count(), 0.0
    while long.num_computed_tokens < 300:
        short = due(distinct(chr(200 + next(newcomers)), 60), now_s + 1.0)
        scheduler.add(short)
        batch = step(scheduler, now_s)
        now_s += sum(item.num_tokens for item in batch.prefill) / 1e3
        for item in batch.prefill:
            if item.sample and item.sequence is not long:
                scheduler.finish(item.sequence)
    assert now_s < 0.3 / AGING + 0.3 + 0.06 * 2, "it waits at most its own time divided by AGING, then runs"


def test_a_prompt_with_an_earlier_due_time_counts_as_if_it_had_come_earlier() -> None:
    scheduler = make_scheduler(256, max_batch_tokens=64)
    scheduler.budget.times = SLOW
    scheduler.add(due(distinct("usual", 200), 1.0))
    scheduler.add(due(distinct("hurried", 250), 0.2))
    assert names(step(scheduler))[0] == ["hurried"]


def test_a_step_beside_answers_lasts_as_long_as_their_target() -> None:
    scheduler = make_scheduler(1024, max_batch_tokens=500)
    scheduler.budget.times = SLOW
    for answer in "abcd":
        scheduler.add(distinct(answer, 4))
    step(scheduler)
    scheduler.add(distinct("long", 400))
    assert step(scheduler).prefill[0].num_tokens == 50 - 4, "a ms each, beside one of each answer"


def test_prompts_alone_take_long_steps() -> None:
    scheduler = make_scheduler(1024, max_batch_tokens=500)
    scheduler.budget.times = SLOW
    scheduler.add(distinct("long", 400))
    assert step(scheduler).num_tokens == 100


def test_the_first_prompt_gets_some_tokens_however_slow_the_device_is() -> None:
    scheduler = make_scheduler(1024, max_batch_tokens=500)
    scheduler.budget.times = StepTimes(0.0, 1e6, 0.0, 0.0, 1.0, 0.0)
    scheduler.add(distinct("long", 400))
    assert step(scheduler).num_tokens == LEAST_TOKENS


def test_steps_are_short_while_nobody_knows_how_long_prompts_take() -> None:
    scheduler = make_scheduler(1024, max_batch_tokens=3000)
    scheduler.budget.is_blind = True
    scheduler.add(distinct("long", 2000))
    assert step(scheduler).num_tokens == BLIND_TOKENS


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
    assert names(step(scheduler))[0] == ["b", "long"]


@pytest.mark.parametrize("seed", range(20))
def test_prompts_come_to_their_ends_whichever_first_tokens_are_due(seed: int) -> None:
    source = random.Random(seed)
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
        for item in step(scheduler, now_s).prefill:
            now_s += item.num_tokens / 1e3
            if item.sample:
                scheduler.finish(item.sequence)
                del left[item.sequence.request_id]
        if not left:
            return
    raise AssertionError(f"did not come to an end: {left}")


def test_a_short_prompt_does_not_go_before_one_of_higher_priority() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    scheduler.add(distinct("urgent", 60, priority=1))
    step(scheduler)
    scheduler.add(distinct("short", 4))
    batch = step(scheduler)
    assert names(batch) == (["urgent"], [])
    assert [item.num_tokens for item in batch.prefill] == [8]


def test_no_more_than_max_running_start() -> None:
    scheduler = make_scheduler(64, max_running=2)
    for name in "abc":
        scheduler.add(distinct(name, 4))
    assert names(step(scheduler)) == (["a", "b"], [])
    scheduler.finish(next(iter(scheduler.running)))
    assert names(step(scheduler)) == (["c"], ["b"])


def test_answers_of_one_priority_take_turns_when_more_were_admitted_than_may_run() -> None:
    scheduler = make_scheduler(64, max_running=3)
    for name, priority in (("a", 0), ("b", 0), ("urgent", 1), ("c", 0), ("later", -1)):
        sequence = distinct(name, 4, priority=priority)
        assert scheduler.reserve(sequence)
        sequence.num_computed_tokens = 4
        sequence.token_ids.append(1)
        scheduler.admit(sequence)
    assert [names(step(scheduler))[1] for _ in range(4)] == [
        ["urgent", "a", "b"],
        ["urgent", "a", "c"],
        ["urgent", "b", "c"],
        ["urgent", "a", "b"],
    ]


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


def test_only_some_of_those_who_wait_are_asked_whether_they_fit() -> None:
    scheduler = make_scheduler(30, max_batch_tokens=500, max_running=64)
    assert scheduler.reserve(distinct("held", 16))
    for number in range(LOOK_AHEAD + 1):
        scheduler.add(distinct(chr(ord("a") + number), 4 + number))
    assert len(step(scheduler).prefill) == LOOK_AHEAD


def test_a_prompt_decodes_while_an_earlier_one_is_still_under_way() -> None:
    scheduler = make_scheduler(64, max_batch_tokens=8)
    scheduler.add(distinct("long", 60))
    step(scheduler)
    scheduler.add(distinct("short", 5))
    assert names(step(scheduler)) == (["short", "long"], [])
    assert names(step(scheduler)) == (["long"], ["short"])


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
    sliding_sources: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict)
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
                self.scribble(entry[2])
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
        if window := self.runner.window:
            first = self.first_seen(sequence)
            written = max(start, first)
            self.runner.sliding.write(sequence.window_table, sequence.token_ids, written, sequence.num_tokens)
            seen = max(first, sequence.num_tokens - window + 1)
            self.runner.sliding.check(sequence.window_table, sequence.token_ids, sequence.num_tokens, seen)
        self.take(self.engine.admit(sequence, next_token(sequence.token_ids), None), 0)

    def scribble(self, sequence: Sequence) -> None:
        """A peer may write at once what is reserved, also while a step is on its way."""
        for position in range(sequence.num_computed_tokens, sequence.num_tokens):
            self.runner.slab.values[self.runner.slab.at(sequence.block_table, position)] = -1
            if self.runner.window and position >= self.first_seen(sequence):
                self.runner.sliding.values[self.runner.sliding.at(sequence.window_table, position)] = -1

    def first_seen(self, sequence: Sequence) -> int:
        """The first token of the first block that the token behind a prompt sees in layers with a window."""
        size = self.runner.slab.block_size
        return max(0, sequence.num_tokens - self.runner.window + 1) // size * size

    def unpin(self, sequence: Sequence) -> None:
        for at, value in self.sources.pop(sequence.request_id, {}).items():
            assert self.runner.slab.values[at] == value, "a block changed under its reader"
        for at, value in self.sliding_sources.pop(sequence.request_id, {}).items():
            assert self.runner.sliding.values[at] == value, "a place changed under its reader"
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
                if self.runner.window:
                    sliding, table = self.runner.sliding, item.sequence.window_table
                    source = self.sliding_sources.setdefault(item.sequence.request_id, {})
                    for position in range(max(self.first_seen(item.sequence), item.start), item.end):
                        place = sliding.at(table, position)
                        source[place] = sliding.values[place]

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
    window=st.sampled_from([0, 0, 1, 3, 6]),
    spare_places=st.integers(0, 8),
)
def test_everything_ends_with_the_sequential_answer(
    work: list[Request],
    spare_blocks: int,
    max_batch_tokens: int,
    max_running: int,
    block_size: int,
    depth: int,
    watched: bool,
    window: int,
    spare_places: int,
) -> None:
    num_blocks = max(-(-request.most_tokens // block_size) for request in work) + spare_blocks
    engine, runner = make_engine(
        num_blocks,
        block_size,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        depth=depth,
        window=window,
        spare_places=spare_places,
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
