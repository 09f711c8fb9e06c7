"""Decides what the next step computes and who holds memory. Pure bookkeeping: no tensors, no clock.

One order rules memory, `Sequence.order`: higher priority first, then earlier arrival. A sequence keeps its arrival
while it waits for a reservation and when it is preempted. Memory is taken from the last sequence in order for the
first.

Prompts are computed, and given memory, in the order of prefill_budget.py, highest priority first: little work first,
and the longer a prompt waits, the sooner; before all, what has begun to answer and was preempted. Nobody starts after
one that waits for memory. A sequence whose prefix is being read from the disk is passed by later ones until that has
ended, and so is one that waits for another prompt to compute the prefix that both have in common. Such a sequence
holds no blocks, and only those that hold theirs are waited for. Hence the first sequence that waits for no read always
advances, and no sequence starves. Nor does one whose blocks are being copied hold up others.
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence as Run
from itertools import chain, islice
from math import inf
from typing import Final, NamedTuple

from baton_proto.discovery import prefill_pairs
from engine.blocks.block_manager import BlockManager
from engine.core.prefill_budget import BLIND_TOKENS, LEAST_TOKENS, Prompt, StepBudget, follows
from engine.drafts.speculation import Speculation
from engine.interface import LOOK_AHEAD
from engine.sequences.batch import Batch, ScheduledSequence
from engine.sequences.sequence import Sequence, SequenceStatus
from engine.sequences.sequence_queue import ORDER, SequenceQueue
from runtime.config.planner import TargetsConfig
from runtime.step_rule import in_tiles

RANKED: Final = 128  # waiting sequences, in order of arrival, that a step looks at


class DeadEnd(NamedTuple):
    """A sequence that the pool can never serve, or cannot serve any further. It is finished and holds no blocks."""

    sequence: Sequence
    finish: str  # "error" | "length"
    error: str | None


class _Ranked(NamedTuple):
    key: tuple[int, bool, float, int]
    prompt: Prompt
    work_ms: float
    sequence: Sequence


class Scheduler:
    """Running sequences prefill, in chunks, or decode. Remote ones hold blocks, and only their owner knows them."""

    def __init__(
        self,
        block_manager: BlockManager,
        speculation: Speculation | None = None,
        *,
        max_batch_tokens: int,
        max_running: int,
        targets: TargetsConfig | None = None,
    ) -> None:
        """speculation: None: nothing is guessed."""
        assert max_batch_tokens > 0
        assert max_running > 0
        self.block_manager = block_manager
        self._tiers = block_manager.tiers
        self._speculation = speculation or Speculation(None)
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.budget = StepBudget(targets or TargetsConfig())
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()  # more than max_running when remote ones are admitted; then they take turns
        self.num_preemptions = 0
        self._arrivals = itertools.count()
        self._waiting_tokens = 0
        self._waiting_pairs = 0
        self._starved: Sequence | None = None  # the first prompt, in their order, that waits for memory
        self._dead_ends: list[DeadEnd] = []
        self._had_turn = (0, -1)  # the order of whose turn was the last one

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence to be prefilled and decoded here."""
        self._stamp(sequence)
        if not self.fits_pool(sequence.num_tokens):
            sequence.status = SequenceStatus.FINISHED
            pool_tokens = self.block_manager.num_blocks * self.block_manager.block_size
            problem = f"{sequence.num_tokens} tokens do not fit into the KV pool of {pool_tokens}"
            self._dead_ends.append(DeadEnd(sequence, "error", problem))
            return
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
        if not self.block_manager.allocate(sequence, keep_available=self._headroom(), arrives=True):
            return False
        sequence.status = SequenceStatus.REMOTE
        return not self._tiers.is_moving(sequence)

    def follows(self, sequence: Sequence, leaders: Run[Sequence]) -> bool:
        """Whether a sequence without blocks had better wait, because one of `leaders` is about to have what it would
        compute next. leaders: with blocks whose KV is being computed, here or elsewhere."""
        self._stamp(sequence)
        leader = sequence.leader
        if leader is not None and leader in leaders and leader.num_computed_tokens < sequence.num_led_tokens:
            return True
        size, cached = self.block_manager.block_size, -1
        step_tokens = min(self.max_batch_tokens, self.budget.step_tokens)
        sequence.leader = None
        for leader in leaders:
            shared = sequence.shared_tokens(leader, size) if leader.priority >= sequence.priority else 0
            if leader.num_computed_tokens >= shared:
                continue
            cached = len(self._tiers.usable_hits(sequence)) * size if cached < 0 else cached
            left = leader.num_tokens - leader.num_scheduled_tokens
            if follows(sequence.num_tokens - cached, shared - cached, left, step_tokens):
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
        if sequence is self._starved:
            self._starved = None
        self._speculation.forget(sequence)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees the blocks of a finished sequence if nobody uses them any more."""
        if not sequence.pinned and not sequence.num_in_flight_tokens:
            self.block_manager.free(sequence)

    def schedule(self, now_s: float = 0.0) -> Batch:
        """The next step: a token for each decoding sequence and its draft, and prompt chunks as far as the budget goes.
        May be empty.
        A sequence whose copies are not enqueued yet is left out, unless there is nothing else to run. now_s: on the
        clock of Sequence.due_s."""
        grown = self._schedule_decode()
        ready = [item for item in grown if not item.sequence.moves or _is_enqueued(item.sequence)]
        decode, drafted = self._speculation.apart(ready, self.max_batch_tokens, self.block_manager.block_size)
        prefill = self._schedule_prefill(drafted + decode, now_s)
        if not (grown or prefill) and self._is_stuck:
            self._preempt(next(last for last in reversed(self.running) if not last.prefill_only))
            return self.schedule(now_s)
        return Batch(prefill, decode if ready or prefill else grown, drafted)

    @property
    def _is_stuck(self) -> bool:
        """Whether prompts that have begun wait for places that others hold, and nobody is about to give any back."""
        starved, running = self._starved, self.running
        if starved is None or starved.status is not SequenceStatus.RUNNING or len(running) == 1:
            return False
        is_yielding = any(not sequence.prefill_only for sequence in running)
        return is_yielding and not any(sequence.num_in_flight_tokens for sequence in running)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether the next tokens of the decoding sequences need more blocks than are available."""
        manager = self.block_manager
        num_available = manager.num_at_once
        if len(self.running) <= num_available:  # none needs more than one
            return False
        num_new = sum(
            manager.blocks_for(sequence.num_tokens) - len(sequence.block_table)
            for sequence in self.running
            if sequence.is_decoding
        )
        return num_new > num_available

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
        limit = min(self.max_running, self.max_batch_tokens)
        if len(self.running) <= limit:
            return self._with_room(list(self.running))
        decoding = [sequence for sequence in self.running if sequence.is_decoding]
        # Where nobody whose turn it is finds room, the first in order does, because it takes that of the last.
        return self._with_room(self._in_turn(decoding, limit)) or self._with_room(decoding[:limit])

    def _in_turn(self, decoding: list[Sequence], limit: int) -> list[Sequence]:
        """Those that this step computes, in order: of too many, no answer of a priority waits for another's end."""
        if len(decoding) <= limit:
            return decoding
        least = decoding[limit - 1].priority
        higher = [sequence for sequence in decoding if sequence.priority > least]
        alike = [sequence for sequence in decoding if sequence.priority == least]
        behind = bisect_right(alike, self._had_turn, key=ORDER)
        chosen = (alike[behind:] + alike[:behind])[: limit - len(higher)]
        self._had_turn = chosen[-1].order
        return higher + sorted(chosen, key=ORDER)

    def _with_room(self, running: list[Sequence]) -> list[ScheduledSequence]:
        """Those of them that decode. Invariant: they are in order, so that none takes the blocks of one before it."""
        size = self.block_manager.block_size
        return [
            ScheduledSequence(sequence, sequence.num_scheduled_tokens, 1, sample=True)
            for sequence in running
            # Whose blocks have room needs no `_grow`, which would find the same.
            if sequence.is_decoding
            and (sequence.num_tokens <= len(sequence.block_table) * size or self._grow(sequence))
        ]

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

    def _schedule_prefill(self, decode: list[ScheduledSequence], now_s: float) -> list[ScheduledSequence]:
        """decode: with or without drafts.

        A prompt whose blocks are being copied for longer than a step takes is left out, unless there is nothing else
        to run."""
        self._starved = None
        num_rows = sum([item.num_tokens for item in decode])
        room = self.max_batch_tokens - num_rows
        room = min(room, BLIND_TOKENS) if self.budget.is_blind else room
        prompts = self._ranked(now_s) if room > 0 else []
        if not prompts:
            return []
        context_tokens = sum([item.end for item in decode])
        queue_ms = sum(one.work_ms for one in prompts)
        budget_ms = self.budget.prompt_ms(len(decode), context_tokens, queue_ms)
        items: list[ScheduledSequence] = []
        copied: list[Sequence] = []
        num_seen, leaders = 0, self._leaders()
        for one in prompts:
            sequence = one.sequence
            if items and (room <= 0 or not self.budget.tokens(budget_ms, one.prompt)):
                break
            if sequence.status is SequenceStatus.WAITING:
                if num_seen == LOOK_AHEAD or self.follows(sequence, leaders):
                    continue
                num_seen += 1
                if not self._starts(sequence):
                    continue
                leaders.append(sequence)
            if sequence.moves and not self._tiers.is_near(sequence):
                copied.append(sequence)
                continue
            if not self.block_manager.reach(sequence, 1, num_rows):
                self._starved = self._starved or sequence
                continue
            item = self._chunk(sequence, budget_ms, room, num_rows, is_first=not items)
            items.append(item)
            if not item.sample:
                break
            room -= item.num_tokens
            num_rows += item.num_tokens
            budget_ms -= self.budget.work_ms(Prompt(item.start, item.num_tokens, inf))
        if copied and not items and not decode:
            return [self._chunk(copied[0], budget_ms, room, num_rows, is_first=True)]
        return items

    def _ranked(self, now_s: float) -> list[_Ranked]:
        """The prompts that run or wait, in their order."""
        ranked = []
        begun = [sequence for sequence in self.running if sequence.is_prefilling]
        for sequence in chain(begun, islice(self.waiting, RANKED)):
            if sequence.status is SequenceStatus.WAITING:
                start, end = self._at_hand(sequence), sequence.num_tokens
            else:
                start, end = sequence.num_scheduled_tokens, sequence.num_prefill_tokens
            prompt = Prompt(start, end - start, (sequence.due_s - now_s) * 1e3)
            work_ms = self.budget.work_ms(prompt)
            priority, arrival = sequence.order
            key = priority, not sequence.num_output_tokens, self.budget.rank(work_ms, prompt.due_ms), arrival
            ranked.append(_Ranked(key, prompt, work_ms, sequence))
        ranked.sort()
        return ranked

    def _at_hand(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that need not be computed, as far as is known without looking at all."""
        tiers, known = self._tiers, sequence.num_looked_up
        sequence.num_looked_up = tiers.more_at_hand(sequence, known) if known >= 0 else tiers.tokens_at_hand(sequence)
        return min(sequence.num_looked_up, sequence.num_tokens - 1)

    def _starts(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence its blocks if it may have them now."""
        if self._starved is not None or len(self.running) >= self.max_running or self._tiers.restores(sequence):
            return False
        if not self._start(sequence, self._headroom()):
            self._starved = sequence
            return False
        return True

    def _chunk(
        self, sequence: Sequence, budget_ms: float, room: int, num_rows: int, *, is_first: bool
    ) -> ScheduledSequence:
        """The tokens of a prompt that this step computes behind other rows."""
        start = sequence.num_scheduled_tokens
        left = sequence.num_prefill_tokens - start
        num_tokens = self.budget.tokens(budget_ms, Prompt(start, left, inf))
        num_tokens = min(left, room, max(num_tokens, LEAST_TOKENS if is_first else 1))
        num_tokens = self.block_manager.reach(sequence, num_tokens, num_rows)
        num_tokens = num_tokens if num_tokens == left else in_tiles(num_rows, num_tokens)
        return ScheduledSequence(sequence, start, num_tokens, sample=num_tokens == left)

    def _leaders(self) -> list[Sequence]:
        """Returns the sequences whose KV is being computed here, which others may follow."""
        return [sequence for sequence in self.running if sequence.num_computed_tokens < sequence.num_prefill_tokens]

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
