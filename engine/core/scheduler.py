"""Decides what the next step computes and who holds memory. Pure bookkeeping: no tensors, no clock.

One order rules memory, `Sequence.order`: higher priority first, then earlier arrival. A sequence keeps its arrival
while it waits for a reservation and when it is preempted. Memory is taken from the last sequence in order for the
first, and no sequence starts or reserves before an earlier one that waits for memory. Of a step's token budget, the
first prompt in order has a quarter by right, unless first tokens are about to be late (prefill_budget.py), which is
looked at among the prompts of the highest priority. A sequence whose prefix is being read from the disk is
passed by later ones until that has ended, and so is one that waits for an earlier prompt to compute the prefix that
both have in common. Such a sequence holds no blocks, and only earlier ones are waited for. Hence the first sequence
that waits for no read always advances, and no sequence starves. Nor does one whose blocks are being copied hold up
others.
"""

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence as Run
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import NamedTuple

from baton_proto.discovery import prefill_pairs
from engine.blocks.block_manager import BlockManager
from engine.core.prefill_budget import ComingBlocks, Due, Turns, follows, share_by_turns, slips_in, turns
from engine.core.timed_steps import TimedSteps
from engine.interface import LOOK_AHEAD
from engine.sequences.batch import Batch, ScheduledSequence
from engine.sequences.sequence import Sequence, SequenceStatus
from engine.sequences.sequence_queue import ORDER, SequenceQueue


class DeadEnd(NamedTuple):
    """A sequence that the pool can never serve, or cannot serve any further. It is finished and holds no blocks."""

    sequence: Sequence
    finish: str  # "error" | "length"
    error: str | None


class _Dated(NamedTuple):
    """Sequences whose first tokens are due, see prefill_budget.Turns."""

    first: list[Sequence]
    late: list[Sequence]


_NOBODY = _Dated([], [])


class Scheduler:
    """Running sequences prefill, in chunks, or decode. Remote ones hold blocks, and only their owner knows them."""

    def __init__(self, block_manager: BlockManager, *, max_batch_tokens: int, max_running: int) -> None:
        assert max_batch_tokens > 0
        assert max_running > 0
        self.block_manager = block_manager
        self._tiers = block_manager.tiers
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()  # more than max_running when remote ones are admitted; then the first decode
        self.num_preemptions = 0
        self._arrivals = itertools.count()
        self._waiting_tokens = 0
        self._waiting_pairs = 0
        self._starved: Sequence | None = None  # the first of `waiting`, while it waits for memory
        self._dead_ends: list[DeadEnd] = []
        self._dated = _NOBODY  # in the next step
        self._has_dated = False  # whether a first token may be due

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence to be prefilled and decoded here."""
        self._stamp(sequence)
        if not self.fits_pool(sequence.num_tokens):
            sequence.status = SequenceStatus.FINISHED
            pool_tokens = self.block_manager.num_blocks * self.block_manager.block_size
            problem = f"{sequence.num_tokens} tokens do not fit into the KV pool of {pool_tokens}"
            self._dead_ends.append(DeadEnd(sequence, "error", problem))
            return
        self._has_dated |= sequence.due_s < inf
        self._wait(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Takes blocks for a sequence that is prefilled elsewhere. False: its turn has not come, or what lay in its
        blocks is still being copied; the caller asks again."""
        if sequence.block_table:
            return not self._tiers.is_moving(sequence)
        self._stamp(sequence)
        if self._starved is not None and self._starved.order < sequence.order:
            return False
        if self._tiers.restores(sequence):
            return False
        if not self.block_manager.allocate(sequence, keep_available=self._headroom()):
            return False
        sequence.status = SequenceStatus.REMOTE
        return not self._tiers.is_moving(sequence)

    def follows(self, sequence: Sequence, leaders: Run[Sequence]) -> bool:
        """Whether a sequence without blocks had better wait, because an earlier one of `leaders` is about to have what
        it would compute next. leaders: with blocks whose KV is being computed, here or elsewhere."""
        self._stamp(sequence)
        leader = sequence.leader
        if leader is not None and leader in leaders and leader.num_computed_tokens < sequence.num_led_tokens:
            return True
        size, cached = self.block_manager.block_size, -1
        sequence.leader = None
        for leader in leaders:
            shared = sequence.shared_tokens(leader, size) if leader.order < sequence.order else 0
            if leader.num_computed_tokens >= shared:
                continue
            cached = self._tiers.cached_tokens(sequence) if cached < 0 else cached
            left = leader.num_tokens - leader.num_scheduled_tokens
            if follows(sequence.num_tokens - cached, shared - cached, left, self.max_batch_tokens):
                sequence.leader, sequence.num_led_tokens = leader, shared
                return True
        return False

    def admit(self, sequence: Sequence) -> None:
        """A remote sequence, whose prompt's KV and first token have arrived, decodes from now on."""
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes out a sequence in any state. Its blocks are freed, unless they are pinned or a step that is on its way
        uses them."""
        if sequence.status is SequenceStatus.WAITING:
            self._leave_waiting(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees the blocks of a finished sequence if nobody uses them any more."""
        if not sequence.pinned and not sequence.num_in_flight_tokens:
            self.block_manager.free(sequence)

    def look_ahead(self, now_s: float, took: TimedSteps) -> None:
        """Finds which first tokens would be late; called before schedule(). now_s: on the clock of Sequence.due_s.
        took: the times of former steps."""
        if self._has_dated:
            self._dated = self._turns(now_s, took)

    def schedule(self) -> Batch:
        """The next step: a token for each decoding sequence, and prompt chunks for the rest of the budget. May be
        empty. A sequence whose copies are not enqueued yet is left out, unless there is nothing else to run."""
        grown = self._schedule_decode()
        decode = [item for item in grown if not item.sequence.moves or _is_enqueued(item.sequence)]
        prefill = self._schedule_prefill(self.max_batch_tokens - len(decode), alone=not decode)
        return Batch(prefill, decode if decode or prefill else grown)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether the next tokens of the decoding sequences need more blocks than are available."""
        manager = self.block_manager
        if len(self.running) <= manager.num_available:  # none needs more than one
            return False
        num_new = sum(
            manager.blocks_for(sequence.num_tokens) - len(sequence.block_table)
            for sequence in self.running
            if sequence.is_decoding
        )
        return num_new > manager.num_available

    def take_dead_ends(self) -> list[DeadEnd]:
        taken, self._dead_ends = self._dead_ends, []
        return taken

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._dead_ends)

    @property
    def queued_prefill(self) -> tuple[int, int]:
        """Tokens that have to be prefilled here, and pairs of such a token with a token before it. Both are upper
        bounds: what the cache holds of a waiting sequence is not known yet."""
        tokens, pairs = self._waiting_tokens, self._waiting_pairs
        for sequence in self.running:
            if sequence.is_prefilling:
                tokens += sequence.num_prefill_tokens - sequence.num_computed_tokens
                pairs += prefill_pairs(sequence.num_computed_tokens, sequence.num_prefill_tokens)
        return tokens, pairs

    def fits_pool(self, num_tokens: int) -> bool:
        """Whether the pool could hold a sequence of that length alone."""
        return self.block_manager.blocks_for(num_tokens) <= self.block_manager.num_blocks

    # --- decode -------------------------------------------------------------------------------------------------------

    def _schedule_decode(self) -> list[ScheduledSequence]:
        limit, size = min(self.max_running, self.max_batch_tokens), self.block_manager.block_size
        items: list[ScheduledSequence] = []
        for sequence in list(self.running):
            if len(items) == limit:
                break
            # Whose blocks have room needs no `_grow`, which would find the same.
            if sequence.is_decoding and (
                sequence.num_tokens <= len(sequence.block_table) * size or self._grow(sequence)
            ):
                items.append(ScheduledSequence(sequence, sequence.num_scheduled_tokens, 1, sample=True))
        return items

    def _grow(self, sequence: Sequence) -> bool:
        """Takes room for the newest token, from later sequences if need be. False: the sequence pauses or has ended."""
        if not self.fits_pool(sequence.num_tokens):
            self.finish(sequence)
            self._dead_ends.append(DeadEnd(sequence, "length", None))
            return False
        while not self.block_manager.append(sequence):
            # Invariant: a sequence that decodes is not prefill-only; the last one is the sequence itself, or later.
            victim = next(last for last in reversed(self.running) if not last.prefill_only)
            if victim.order <= sequence.order:
                return False  # remote, pinned or earlier sequences hold the other blocks and will give them back
            self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """The sequence waits again, at its place in order. Its KV stays cached until the blocks are needed."""
        self.running.remove(sequence)
        self.block_manager.free(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _schedule_prefill(self, budget: int, *, alone: bool) -> list[ScheduledSequence]:
        """alone: the step has no decodes. A prompt whose blocks are being copied for longer than a step takes is left
        out, unless there is nothing else to run."""
        self._starved = None
        prompts = [sequence for sequence in self.running if sequence.is_prefilling]
        if self.waiting and budget > 0:
            if self._dated.first:
                self._start_in_danger(prompts, budget)
            self._start_waiting(prompts, budget)
        near = [sequence for sequence in prompts if not sequence.moves or self._tiers.is_near(sequence)]
        if near or not alone:
            prompts = near
        items: list[ScheduledSequence] = []
        for _, equals in groupby(prompts, key=attrgetter("priority")):
            for sequence, num_tokens in self._share(budget, list(equals)):
                start = sequence.num_scheduled_tokens
                complete = start + num_tokens == sequence.num_prefill_tokens
                items.append(ScheduledSequence(sequence, start, num_tokens, sample=complete))
                budget -= num_tokens
        return items

    def _start_waiting(self, prompts: list[Sequence], budget: int) -> None:
        """Starts the sequences whose turn comes in this step, in order until memory is short, and those that slip in
        before their turn. They join `prompts`, which stays in order."""
        passed: Sequence | None = None  # the first one whose turn does not come; memory is kept for it
        late = set(self._dated.late)
        everyone = self._leaders()
        leaders = [one for one in everyone if one not in late]
        last = late.difference(self.waiting[:1])  # the first one's turn comes however many are in time
        order = list(self.waiting)
        if last:
            order = [one for one in order if one not in last] + [one for one in self._dated.late if one in last]
        num_seen = 0
        for sequence in order:
            if len(self.running) >= self.max_running or num_seen == LOOK_AHEAD:
                return
            behind = everyone if sequence in late else leaders  # what is late goes last: it leads only its like
            if sequence.status is not SequenceStatus.WAITING or self.follows(sequence, behind):
                continue
            num_seen += 1
            if self._tiers.restores(sequence):
                continue
            place = bisect_left(prompts, sequence.order, key=ORDER)
            before = prompts if sequence in last else [one for one in prompts[:place] if one not in late]
            if not self._has_turn(sequence, before, budget):
                passed = passed or sequence
                continue
            kept = 0 if passed is None else self.block_manager.blocks_for(passed.num_tokens)
            if self._start(sequence, self._headroom() + kept):
                prompts.insert(place, sequence)
                everyone.append(sequence)
                if sequence not in late:
                    leaders.append(sequence)
            elif passed is None:
                self._starved = sequence
                return

    def _leaders(self) -> list[Sequence]:
        """Returns the sequences whose KV is being computed here, which others may follow."""
        return [sequence for sequence in self.running if sequence.num_computed_tokens < sequence.num_prefill_tokens]

    def _turns(self, now_s: float, took: TimedSteps) -> _Dated:
        prompts = [sequence for sequence in self.running if sequence.is_prefilling]
        both = (*prompts, *self.waiting)
        dated = [one for one in both if one.due_s < inf and not one.num_output_tokens]
        self._has_dated = bool(dated)
        step_s = took.attentive_s(self.max_batch_tokens, 0)
        if not dated or not 0.0 < step_s < inf:
            return _NOBODY
        highest = max(sequence.priority for sequence in (*prompts, *self.waiting[:1]))
        dated = sorted((one for one in dated if one.priority == highest), key=attrgetter("due_s"))
        coming = ComingBlocks()
        dues: list[Due] = []
        for place, sequence in enumerate(dated):
            start, end = self._span(sequence, coming, is_near=place < LOOK_AHEAD)
            due = Due(took.attentive_s(end - start, prefill_pairs(start, end)), sequence.due_s - now_s)
            computed = min(start, sequence.num_computed_tokens) if sequence.block_table else start
            coming.add(sequence.sequence_hashes, computed // self.block_manager.block_size, due)
            dues.append(due)
        order = turns(dues, step_s)
        return _Dated([dated[i] for i in order.first], [dated[i] for i in order.late])

    def _span(self, sequence: Sequence, coming: ComingBlocks, *, is_near: bool) -> tuple[int, int]:
        """Which tokens of its prompt a sequence has still to compute, [start, end), after those that are due sooner."""
        if sequence.status is not SequenceStatus.WAITING:
            return sequence.num_scheduled_tokens, sequence.num_prefill_tokens
        tiers, size = self._tiers, self.block_manager.block_size
        if is_near or sequence.num_looked_up < 0:
            sequence.num_looked_up = tiers.tokens_at_hand(sequence)
        else:
            sequence.num_looked_up = tiers.more_at_hand(sequence, sequence.num_looked_up)
        at_hand, hashes = sequence.num_looked_up, sequence.sequence_hashes
        end = min(len(hashes), (sequence.num_tokens - 1) // size)  # the last token is always computed
        return max(at_hand, coming.start(hashes, at_hand // size, end) * size), sequence.num_tokens

    def _start_in_danger(self, prompts: list[Sequence], budget: int) -> None:
        """Starts sequences that would be late if others had this step. They join `prompts`, which stays in order."""
        late = set(self._dated.late)
        leaders = [one for one in self._leaders() if one not in late]
        for sequence in self._dated.first:
            if budget <= 0 or len(self.running) >= self.max_running:
                return
            if sequence.status is SequenceStatus.WAITING:
                if self.follows(sequence, leaders):
                    continue
                passed = self.waiting[0]
                if self._needs_place(passed) and not self._tiers.restores(passed):
                    return
                kept = 0 if passed is sequence else self.block_manager.blocks_for(passed.num_tokens)
                if self._tiers.restores(sequence) or not self._start(sequence, self._headroom() + kept):
                    continue
                insort(prompts, sequence, key=ORDER)
                leaders.append(sequence)
            budget -= _left(sequence)

    def _needs_place(self, passed: Sequence) -> bool:
        """Whether the last place is for the first one that waits: it is in no danger, and all that run have passed
        it."""
        if len(self.running) + 1 < self.max_running or passed in self._dated.first:
            return False
        return not self.running or passed.order < self.running[0].order

    def _share(self, budget: int, prompts: list[Sequence]) -> Iterator[tuple[Sequence, int]]:
        """How many tokens each of some prompts of equal priority gets, in order."""
        first, late = ([prompts.index(one) for one in part if one in prompts] for part in self._dated)
        shares = share_by_turns(budget, list(map(_left, prompts)), Turns(first, late))
        return ((sequence, share) for sequence, share in zip(prompts, shares, strict=True) if share)

    def _has_turn(self, sequence: Sequence, before: list[Sequence], budget: int) -> bool:
        if sum(map(_left, before)) < budget:
            return True
        first = before[0]
        return first.priority == sequence.priority and slips_in(
            sequence.num_tokens - self._tiers.cached_tokens(sequence), _left(first)
        )

    def _start(self, sequence: Sequence, keep_available: int) -> bool:
        if not self.block_manager.allocate(sequence, keep_available=keep_available):
            return False
        self._leave_waiting(sequence)
        sequence.num_prefill_tokens = sequence.num_tokens
        sequence.status = SequenceStatus.RUNNING
        self.running.add(sequence)
        return True

    def _headroom(self) -> int:
        """Blocks that a newcomer must leave available: each decoding sequence may need one soon, and preemption costs
        work."""
        return sum(1 for sequence in self.running if not sequence.is_prefilling)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _stamp(self, sequence: Sequence) -> None:
        if sequence.arrival is None:
            sequence.arrival = next(self._arrivals)

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        self.waiting.add(sequence)
        self._waiting_tokens += sequence.num_tokens
        self._waiting_pairs += prefill_pairs(0, sequence.num_tokens)

    def _leave_waiting(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        sequence.leader = None
        self._waiting_tokens -= sequence.num_tokens
        self._waiting_pairs -= prefill_pairs(0, sequence.num_tokens)
        if sequence is self._starved:
            self._starved = None

    def check_integrity(self) -> list[str]:
        """What is wrong with the queues, in sentences; empty when all is well."""
        problems = [
            f"{sequence} is in the waiting queue"
            for sequence in self.waiting
            if sequence.status is not SequenceStatus.WAITING or sequence.block_table
        ]
        for sequence in self.running:
            if sequence.status is not SequenceStatus.RUNNING or not sequence.block_table:
                problems.append(f"{sequence} is among the running")
            elif not sequence.is_prefilling and sequence.num_scheduled_tokens != sequence.num_tokens - 1:
                problems.append(f"{sequence} decodes with {sequence.num_tokens} tokens")
        if self._waiting_tokens != sum(sequence.num_tokens for sequence in self.waiting):
            problems.append(f"{self._waiting_tokens} waiting tokens are not the sum over the waiting queue")
        if self._waiting_pairs != sum(prefill_pairs(0, sequence.num_tokens) for sequence in self.waiting):
            problems.append(f"{self._waiting_pairs} waiting pairs are not the sum over the waiting queue")
        problems.extend(
            f"{sequence} holds blocks"
            for sequence in self.block_manager.holders
            if sequence.status is SequenceStatus.WAITING
            or (
                sequence.status is SequenceStatus.FINISHED and not sequence.pinned and not sequence.num_in_flight_tokens
            )
        )
        return problems


def _is_enqueued(sequence: Sequence) -> bool:
    return all(move.is_enqueued() for move in sequence.moves)


def _left(sequence: Sequence) -> int:
    """Tokens of its prompt that are in no step yet."""
    return sequence.num_prefill_tokens - sequence.num_scheduled_tokens
