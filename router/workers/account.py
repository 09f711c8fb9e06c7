"""How loaded one worker is: what routers have charged it, and what the worker reports. No clock, no I/O.

A charge is made before the worker has heard of the request; the report covers what has reached the worker. Both count
the same requests, so the larger of the two holds. Queued tokens are the exception, where the smaller holds: a prompt
is charged in full until its first token, but the report knows how much of it is computed already; the report counts a
waiting prompt in full, but its charge leaves out what is cached. Prompts that the report may not know yet count fully.
"""

from dataclasses import dataclass, field
from math import exp, inf
from typing import Final, NamedTuple

from baton_proto.discovery import WorkerLoad
from runtime.discovery.worker_key import WorkerKey

FREEING_S: Final = 10.0  # the time over which it is seen how fast a worker's blocks come free
NO_LIMIT: Final = 2**31 - 1  # blocks: the worker has not reported how many it has
REPORT_DELAY_S: Final = 0.2  # a report may not know what was charged so shortly before it came


class LoadView(NamedTuple):
    """The load of one worker."""

    requests: int  # running and waiting, without prompts that a prefill worker ships
    queued_prefill_tokens: int
    active_blocks: int
    queued_prefill_pairs: int = 0  # each of these tokens with each token before it, for the cost of attention


NUM_COLUMNS: Final = 9
(
    REQUESTS,
    QUEUED_TOKENS,
    ACTIVE_BLOCKS,
    QUEUED_PAIRS,  # up to here: LoadView
    STEP_BEGAN_US,  # by the ledger's clock
    UNUSED_BLOCKS,  # from here on: see Account.room
    FREED_US,
    USED_BLOCKS,
    RESERVED_BLOCKS,
) = range(NUM_COLUMNS)
"""Columns of LoadLedger.columns. Because they are compiled into router/placement/cost.py, a new one goes to the end."""


class Totals(NamedTuple):
    """What one router has charged one worker."""

    requests: int
    prefill_tokens: int
    blocks: int
    prefill_pairs: int = 0


NOTHING = Totals(0, 0, 0)
NO_LOAD: Final = WorkerLoad()


@dataclass(slots=True, eq=False)
class _Prefill:
    """What a worker has to compute of prompts, in tokens or in pairs of tokens.

    Time is cut into periods of REPORT_DELAY_S or longer, each of which begins with a report: what was charged in this
    period and the one before may be missing in the last report."""

    charged: int = 0
    _since: int = 0  # charged in this period
    _before: int = 0  # charged in the period before

    def charge(self, amount: int) -> None:
        self.charged += amount
        self._since += amount

    def foreign_change(self, change: int) -> None:
        """Other routers have charged so much more, or less."""
        self._since += max(0, change)

    def begin_period(self) -> None:
        self._before, self._since = self._since, 0

    def left(self, reported: int, foreign: int) -> int:
        """What is still to be computed. Without charges, as after a restart, the report holds alone."""
        charged = self.charged + foreign
        return min(charged, reported + self._before + self._since) if charged else reported


@dataclass(slots=True, eq=False)
class Account:
    """What is known of one worker's load."""

    worker: WorkerKey
    requests: int = 0
    tokens: _Prefill = field(default_factory=_Prefill)
    pairs: _Prefill = field(default_factory=_Prefill)
    blocks: int = 0
    foreign: Totals = NOTHING  # the sum of by_router
    by_router: dict[str, Totals] = field(default_factory=dict)  # other routers, without those that charge nothing
    reported: WorkerLoad = NO_LOAD
    step_began_s: float = 0.0  # a report comes when a step ends, and the next one begins
    _since_s: float = 0.0  # when the period began
    _freed: float = 0.0  # blocks that have come free lately
    _freed_s: float = 0.0  # when that was counted last
    _ended_s: float = -inf  # when a request ended last

    def take_report(self, load: WorkerLoad, now_s: float) -> None:
        if self.reported.blocks_total:
            self._count_freed(self.reported.blocks_used - load.blocks_used, now_s)
        self.reported, self.step_began_s = load, now_s
        if now_s - self._since_s >= REPORT_DELAY_S:
            self._since_s = now_s
            self.tokens.begin_period()
            self.pairs.begin_period()

    def take_blocks(self, blocks: int, now_s: float) -> None:
        """Prompts have taken so many blocks. By how much less the use has risen, as many have come free. So what others
        still share has not come free, and what running requests have grown is taken off."""
        self._count_freed(blocks, now_s)

    def end_request(self, now_s: float) -> None:
        self._ended_s = now_s

    def room(self, now_s: float) -> tuple[int, int, int, int]:
        """Blocks that nobody uses, in how many us one more comes free, blocks in use, and how many of the unused ones
        prompts must leave: each running request may need one soon. 0 us: nothing ended lately, so nobody knows how
        soon. No limit: the worker does not say how many it has."""
        reported = self.reported
        if not reported.blocks_total:
            return NO_LIMIT, 0, 0, 0
        freed_us = 0
        if now_s - self._ended_s <= FREEING_S:
            freed_us = int(FREEING_S * 1e6 / max(1.0, self._freed * exp((self._freed_s - now_s) / FREEING_S)))
        unused = reported.blocks_total - reported.blocks_used
        return unused, freed_us, reported.blocks_used, reported.running

    def _count_freed(self, blocks: int, now_s: float) -> None:
        if blocks:
            self._freed = self._freed * exp((self._freed_s - now_s) / FREEING_S) + blocks
            self._freed_s = now_s

    @property
    def queues(self) -> bool:
        """Whether prompts wait or run there."""
        return self.tokens.left(self.reported.queued_prefill_tokens, self.foreign.prefill_tokens) > 0

    @property
    def own(self) -> Totals:
        return Totals(self.requests, self.tokens.charged, self.blocks, self.pairs.charged)

    def view(self) -> LoadView:
        foreign, reported = self.foreign, self.reported
        return LoadView(
            requests=max(self.requests + foreign.requests, reported.running + reported.waiting - reported.prompts),
            queued_prefill_tokens=self.tokens.left(reported.queued_prefill_tokens, foreign.prefill_tokens),
            active_blocks=max(self.blocks + foreign.blocks, reported.blocks_used),
            queued_prefill_pairs=self.pairs.left(reported.queued_prefill_pairs, foreign.prefill_pairs),
        )

    def set_foreign(self, router: str, totals: Totals) -> None:
        before = self.by_router.get(router, NOTHING)
        self.tokens.foreign_change(totals.prefill_tokens - before.prefill_tokens)
        self.pairs.foreign_change(totals.prefill_pairs - before.prefill_pairs)
        if totals == NOTHING:
            self.by_router.pop(router, None)
        else:
            self.by_router[router] = totals
        self.foreign = Totals(*map(sum, zip(NOTHING, *self.by_router.values(), strict=True)))
