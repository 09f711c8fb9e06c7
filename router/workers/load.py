"""How loaded each worker is, as this router knows it: what it has charged itself, and what the workers report.

A charge is made when a request is routed, before its worker has heard of it, so that the next request sees it at once.
Other routers tell what they have charged (charge_sharing.py). The worker's report covers what has reached it.
Charges and report count the same requests, so the larger of the two holds; but of queued prompts the report knows what
is computed already. Event loop only.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
import structlog
from numpy.typing import NDArray

from baton_proto.discovery import WorkerLoad, prefill_pairs
from router.index.roster import Roster
from runtime.discovery.worker_key import WorkerKey

STORED_HALF_LIFE_S: Final = 300.0  # about as long as a block stays cached when nobody asks for it
REPORT_DELAY_S: Final = 0.2  # a report may not know what was charged so shortly before it came
MAX_HALF_LIVES: Final = 100  # before what is stored is written down anew: a float has room for a thousand

log = structlog.get_logger()


class LoadView(NamedTuple):
    """Of one worker."""

    requests: int  # running and waiting
    queued_prefill_tokens: int
    active_blocks: int
    queued_prefill_pairs: int = 0  # of these tokens and those before each


class Totals(NamedTuple):
    """What one router has charged one worker."""

    requests: int
    prefill_tokens: int
    blocks: int
    prefill_pairs: int = 0


NOTHING = Totals(0, 0, 0)


class _Prefill:
    """What a worker has to compute of prompts, in tokens or in pairs of tokens."""

    __slots__ = ("_before", "_since", "charged")

    def __init__(self) -> None:
        self.charged = 0
        self._since = 0  # charged since the period began
        self._before = 0  # and in the one before

    def charge(self, amount: int) -> None:
        self.charged += amount
        self._since += amount

    def foreign_change(self, change: int) -> None:
        """Of what other routers have charged."""
        self._since += max(0, change)

    def begin_period(self) -> None:
        self._before, self._since = self._since, 0

    def left(self, reported: int, foreign: int) -> int:
        """A prompt is charged in full until its first token; the report knows how much of it is left to compute."""
        return max(reported, min(self.charged + foreign, reported + self._before + self._since))


class _Account:
    __slots__ = ("_since_s", "blocks", "by_router", "foreign", "pairs", "reported", "requests", "tokens", "worker")

    def __init__(self, worker: WorkerKey) -> None:
        self.worker = worker
        self.requests = 0
        self.tokens = _Prefill()
        self.pairs = _Prefill()
        self.blocks = 0
        self.foreign = NOTHING  # the sum of by_router
        self.by_router: dict[str, Totals] = {}  # other routers, without those that charge nothing
        self.reported = WorkerLoad()
        self._since_s = 0.0  # when the period began; each is REPORT_DELAY_S or longer

    def take_report(self, load: WorkerLoad, now_s: float) -> None:
        self.reported = load
        if now_s - self._since_s >= REPORT_DELAY_S:
            self._since_s = now_s
            self.tokens.begin_period()
            self.pairs.begin_period()

    @property
    def own(self) -> Totals:
        return Totals(self.requests, self.tokens.charged, self.blocks, self.pairs.charged)

    def view(self) -> LoadView:
        foreign, reported = self.foreign, self.reported
        return LoadView(
            requests=max(self.requests + foreign.requests, reported.running + reported.waiting),
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


class Charge:
    """What one request costs its workers. Released once, at its end, by `with` or by hand; both may be repeated."""

    __slots__ = (
        *("_blocks", "_decode", "_ledger", "_prefill", "_prefill_pairs", "_prefill_tokens"),
        *("expires_s", "request_id"),
    )

    def __init__(
        self,
        ledger: "LoadLedger",
        request_id: str,
        decode: _Account,
        prefill: _Account,
        blocks: int,
        prefill_tokens: int,
        prefill_pairs: int,
    ) -> None:
        self.request_id = request_id
        self.expires_s = 0.0  # set by the ledger
        self._ledger = ledger
        self._decode = decode
        self._prefill = prefill  # the decode worker's own account when it runs the prompt
        self._blocks = blocks
        self._prefill_tokens = prefill_tokens
        self._prefill_pairs = prefill_pairs
        decode.requests += 1
        decode.blocks += blocks
        prefill.tokens.charge(prefill_tokens)
        prefill.pairs.charge(prefill_pairs)
        ledger.changed(decode, prefill)

    def prefill_done(self) -> None:
        """At the first token."""
        if self._prefill_tokens:
            self._take_off_prefill()
            self._ledger.changed(self._prefill)
            self._ledger.relieved()

    def grow(self, num_tokens: int) -> None:
        """The sequence has `num_tokens` tokens by now: charges the blocks that they fill, and proves that it lives."""
        if self._ledger.renew(self):
            blocks = self._ledger.blocks_of(num_tokens)
            if blocks != self._blocks:
                self._decode.blocks += blocks - self._blocks
                self._blocks = blocks
                self._ledger.changed(self._decode)

    def release(self) -> None:
        if self._ledger.drop(self):
            self.settle()
            self._ledger.relieved()

    def settle(self) -> None:
        """Takes the charge off its workers' accounts. The ledger has dropped it."""
        self._decode.requests -= 1
        self._decode.blocks -= self._blocks
        self._take_off_prefill()
        self._ledger.changed(self._decode, self._prefill)

    def _take_off_prefill(self) -> None:
        self._prefill.tokens.charged -= self._prefill_tokens
        self._prefill.pairs.charged -= self._prefill_pairs
        self._prefill_tokens = self._prefill_pairs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class LoadLedger:
    """`relieved` is called whenever a worker may take more than before; whoever waits for room sets it. `has_news` is
    called when own charges differ from what `take_changed` returned last; whoever tells other routers sets it."""

    def __init__(self, block_size: int, charge_ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.relieved: Callable[[], None] = lambda: None
        self.has_news: Callable[[], None] = lambda: None
        self._changed: set[WorkerKey] = set()
        self._block_size = block_size
        self._charge_ttl_s = charge_ttl_s
        self._clock = clock
        self._accounts: dict[WorkerKey, _Account] = {}
        self._roster = Roster()  # of those with an account
        self._columns = np.zeros((1, len(LoadView._fields)), dtype=np.int64)  # by number; the last row is NOBODY's
        self._stale: set[_Account] = set()  # their rows are not what their views are
        self.num_routers = 1  # that charge the same workers
        self._stored = np.zeros(1)  # by number as well; as if all had been stored at _stored_since_s
        self._stored_since_s = clock()
        self._charges: OrderedDict[Charge, None] = OrderedDict()  # the one that expires first is first

    def charge(
        self, request_id: str, decode: WorkerKey, prefill: WorkerKey | None, num_tokens: int, prefill_tokens: int
    ) -> Charge:
        """Blocks for `num_tokens` on the decode worker, the last `prefill_tokens` of them on the worker that runs the
        prompt."""
        decode_account = self._account(decode)
        prefill_account = decode_account if prefill is None else self._account(prefill)
        blocks = self.blocks_of(num_tokens)
        pairs = prefill_pairs(num_tokens - prefill_tokens, num_tokens)
        charge = Charge(self, request_id, decode_account, prefill_account, blocks, prefill_tokens, pairs)
        now_s = self._clock()
        self._store(prefill_account.worker, self.blocks_of(prefill_tokens), now_s)
        charge.expires_s = now_s + self._charge_ttl_s
        self._charges[charge] = None
        return charge

    def report(self, worker: WorkerKey, load: WorkerLoad) -> None:
        account = self._account(worker)
        before = account.reported
        account.take_report(load, self._clock())
        self._stale.add(account)
        if (
            load.queued_prefill_tokens < before.queued_prefill_tokens
            or load.running + load.waiting < before.running + before.waiting
        ):
            self.relieved()

    def reported(self, worker: WorkerKey) -> WorkerLoad:
        account = self._accounts.get(worker)
        return account.reported if account else WorkerLoad()

    def view(self, worker: WorkerKey) -> LoadView:
        self.expire()
        return self._account(worker).view()

    def columns(self, workers: tuple[WorkerKey, ...]) -> NDArray[np.int64]:
        """The views of many workers, [n, 4] in the order of LoadView's fields."""
        self.expire()
        self._write_down()
        rows: NDArray[np.int64] = self._columns[self._roster.numbers(workers)]
        return rows

    def stored(self, workers: tuple[WorkerKey, ...]) -> NDArray[np.float64]:
        """Blocks that prompts charged here had to store anew, [n], halved for every STORED_HALF_LIFE_S since."""
        left = 0.5 ** ((self._clock() - self._stored_since_s) / STORED_HALF_LIFE_S)
        blocks: NDArray[np.float64] = left * self._stored[self._roster.numbers(workers)]
        return blocks

    def forget(self, worker: WorkerKey) -> None:
        """The incarnation is gone. Charges on it are released by their requests as ever."""
        self._close_account(worker)
        self._changed.discard(worker)

    # --- what routers tell each other ---------------------------------------------------------------------------------

    def take_changed(self) -> dict[WorkerKey, Totals]:
        """Own charges of the workers for which they have changed since the last call."""
        changed = {worker: self._accounts[worker].own for worker in self._changed if worker in self._accounts}
        self._changed.clear()
        return changed

    def charged(self) -> dict[WorkerKey, Totals]:
        """Own charges of all workers that have any."""
        return {worker: account.own for worker, account in self._accounts.items() if account.own != NOTHING}

    def set_foreign(self, router: str, worker: WorkerKey, totals: Totals) -> None:
        """Another router has charged so much by now."""
        if worker not in self._accounts and totals == NOTHING:
            return
        account = self._account(worker)
        before = account.by_router.get(router, NOTHING)
        account.set_foreign(router, totals)
        self._stale.add(account)
        if account.own == NOTHING and not account.by_router and account.reported == WorkerLoad():
            self._close_account(worker)  # perhaps of a worker that is gone
        if totals.requests < before.requests or totals.prefill_tokens < before.prefill_tokens:
            self.relieved()

    def foreign(self, router: str) -> list[WorkerKey]:
        """Workers that another router has charged."""
        return [worker for worker, account in self._accounts.items() if router in account.by_router]

    # --- for charges --------------------------------------------------------------------------------------------------

    def changed(self, account: _Account, other: _Account | None = None) -> None:
        if not self._changed:
            self.has_news()
        self._changed.add(account.worker)
        self._stale.add(account)
        if other is not None and other is not account:
            self.changed(other)

    def expire(self) -> None:
        """Drops charges that nobody released or renewed for their time to live: a request that was lost track of."""
        now = self._clock()
        while self._charges:
            charge = next(iter(self._charges))
            if charge.expires_s > now:
                return
            log.warning("a charge was never released", request_id=charge.request_id, ttl_s=self._charge_ttl_s)
            del self._charges[charge]
            charge.settle()
            self.relieved()

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def renew(self, charge: Charge) -> bool:
        """False when it was released or has expired."""
        if charge not in self._charges:
            return False
        charge.expires_s = self._clock() + self._charge_ttl_s
        self._charges.move_to_end(charge)
        return True

    def drop(self, charge: Charge) -> bool:
        """False when it was gone already."""
        if charge not in self._charges:
            return False
        del self._charges[charge]
        return True

    def _account(self, worker: WorkerKey) -> _Account:
        account = self._accounts.get(worker)
        if account is None:
            account = self._accounts[worker] = _Account(worker)
            if self._roster.add(worker) == len(self._columns) - 1:
                self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
                self._stored = np.concatenate([self._stored, np.zeros_like(self._stored)])
        return account

    def _store(self, worker: WorkerKey, blocks: int, now_s: float) -> None:
        half_lives = (now_s - self._stored_since_s) / STORED_HALF_LIFE_S
        if half_lives > MAX_HALF_LIVES:
            self._stored *= 0.5**half_lives
            self._stored_since_s, half_lives = now_s, 0.0
        self._stored[self._roster.get(worker)] += blocks * 2.0**half_lives

    def _close_account(self, worker: WorkerKey) -> None:
        account = self._accounts.pop(worker, None)
        if account is not None:
            self._stale.discard(account)
            number = self._roster.get(worker)
            self._columns[number], self._stored[number] = 0, 0.0
            self._roster.discard(worker)

    def _write_down(self) -> None:
        """When somebody asks, not for each of the many reports that come between two requests."""
        for account in self._stale:
            if self._accounts.get(account.worker) is account:  # a charge may outlive its worker
                self._columns[self._roster.get(account.worker)] = account.view()
        self._stale.clear()
