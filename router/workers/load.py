"""How loaded each worker is, as this router knows it: the accounts of all workers, and the charges on them.

A charge is made when a request is routed, before its worker has heard of it, so that the next request sees it at once.
Other routers tell what they have charged (charge_sharing.py). Event loop only.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import structlog
from msgspec.structs import astuple
from numpy.typing import NDArray

from baton_proto.discovery import WorkerLoad, prefill_pairs
from router.index.roster import Roster
from router.workers.account import (
    NO_LOAD,
    NOTHING,
    NUM_COLUMNS,
    QUEUED_PAIRS,
    QUEUED_TOKENS,
    Account,
    LoadView,
    Totals,
)
from runtime.config.step_times import USUAL, StepTimes
from runtime.discovery.worker_key import WorkerKey
from runtime.step_rule import rank

CHARGE_TTL_S = 300.0  # a charge that nobody released is dropped: half of the longest request's time

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Charge:
    """What one request costs its workers, until `release` or the end of `with`. Releasing it again has no effect."""

    _ledger: "LoadLedger"
    request_id: str
    _decode: Account
    _prefill: Account  # the decode worker's own account when it runs the prompt
    _blocks: int
    _new_blocks: int  # of these, taken for the prompt
    _prefill_tokens: int
    _prefill_pairs: int
    expires_s: float

    def __post_init__(self) -> None:
        self._decode.requests += 1
        self._decode.blocks += self._blocks
        self._prefill.tokens.charge(self._prefill_tokens)
        self._prefill.pairs.charge(self._prefill_pairs)
        self._ledger.changed(self._decode, self._prefill)

    def prefill_done(self) -> None:
        """Takes the prompt off its worker, at the first token."""
        if self._prefill_tokens:
            self._take_off_prefill()
            self._ledger.blocks_taken(self._decode, self._new_blocks)
            self._ledger.step_begins(self._prefill)
            self._ledger.relieved()

    def grow(self, num_tokens: int) -> None:
        """The sequence has `num_tokens` tokens by now: charges the blocks that they fill, and renews the charge."""
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
        if not self._prefill_tokens:  # else its worker has given it no blocks that could come free
            self._ledger.ended(self._decode)
        self._take_off_prefill()
        self._ledger.changed(self._decode, self._prefill)

    def _take_off_prefill(self) -> None:
        self._prefill.tokens.charged -= self._prefill_tokens
        self._prefill.pairs.charged -= self._prefill_pairs
        self._prefill_tokens = self._prefill_pairs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *why: object) -> None:
        self.release()


class LoadLedger:
    """`times`: of a worker's steps, until `learn` tells better ones. `relieved` is called whenever a worker may take
    more than before. `has_news` is called when own charges differ from what `take_changed` returned last."""

    def __init__(
        self,
        block_size: int,
        charge_ttl_s: float = CHARGE_TTL_S,
        clock: Callable[[], float] = time.monotonic,
        *,
        times: StepTimes = USUAL,
        relieved: Callable[[], None] = lambda: None,
        has_news: Callable[[], None] = lambda: None,
    ) -> None:
        self.relieved = relieved
        self._has_news = has_news
        self._changed: set[WorkerKey] = set()
        self._block_size = block_size
        self._charge_ttl_s = charge_ttl_s
        self._clock = clock
        self._accounts: dict[WorkerKey, Account] = {}
        self._roster = Roster()  # of those with an account
        self._columns = np.zeros((1, NUM_COLUMNS), dtype=np.int64)  # by number; the last row is NOBODY's
        self._stale: set[Account] = set()  # their rows in _columns are out of date
        self.num_routers = 1  # that charge these workers, this one included
        self._profile = astuple(times)
        self._times = np.array([self._profile])  # of steps, by number
        self._restoring = np.zeros((1, 2))  # by number, see `restoring`
        self._charges: OrderedDict[Charge, None] = OrderedDict()  # the one that expires first is first

    def charge(
        self,
        request_id: str,
        decode: WorkerKey,
        prefill: WorkerKey | None,
        num_tokens: int,
        prefill_tokens: int,
        *,
        held_blocks: int = 0,
    ) -> Charge:
        """Charges blocks for `num_tokens` to the decode worker, which has `held_blocks` of them cached, and computing
        the last `prefill_tokens` to the worker that runs the prompt; `prefill` None: the decode worker runs it."""
        decode_account = self._account(decode)
        prefill_account = decode_account if prefill is None else self._account(prefill)
        blocks = self.blocks_of(num_tokens)
        pairs = prefill_pairs(num_tokens - prefill_tokens, num_tokens)
        now_s = self._clock()
        if not prefill_account.queues:
            self.step_begins(prefill_account)
        charge = Charge(
            self,
            request_id,
            decode_account,
            prefill_account,
            blocks,
            blocks - held_blocks,
            prefill_tokens,
            pairs,
            now_s + self._charge_ttl_s,
        )
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
        return account.reported if account else NO_LOAD

    def view(self, worker: WorkerKey) -> LoadView:
        self.expire()
        return self._account(worker).view()

    def columns(self, workers: tuple[WorkerKey, ...]) -> NDArray[np.int64]:
        """The loads of the workers, [n, NUM_COLUMNS]."""
        self.expire()
        self._write_down()
        rows: NDArray[np.int64] = self._columns.take(self._roster.numbers(workers), axis=0)
        return rows

    def columns_before(self, workers: tuple[WorkerKey, ...], num_tokens: int) -> NDArray[np.int64]:
        """As columns(), without the prompts that let a new one of `num_tokens` tokens go first (runtime/step_rule.py),
        as far as this router has sent them."""
        rows, times, now_s = self.columns(workers), self.times(workers), self._clock()
        places = {self._accounts.get(worker): place for place, worker in enumerate(workers)}
        tokens, pairs = rows[:, QUEUED_TOKENS], rows[:, QUEUED_PAIRS]
        own_ms = times[:, 1] * num_tokens + times[:, 2] * prefill_pairs(0, num_tokens)
        for charge in self._charges:
            place = places.get(charge._prefill) if charge._prefill_tokens else None
            if place is not None:
                _, token_ms, pair_ms = times[place, :3].tolist()
                work_ms = token_ms * charge._prefill_tokens + pair_ms * charge._prefill_pairs
                waited_ms = (now_s + self._charge_ttl_s - charge.expires_s) * 1e3
                if rank(work_ms, waited_ms) > own_ms[place]:
                    tokens[place] -= charge._prefill_tokens
                    pairs[place] -= charge._prefill_pairs
        np.maximum(rows, 0, out=rows)
        return rows

    def times(self, workers: tuple[WorkerKey, ...]) -> NDArray[np.float64]:
        """How long the workers' steps take in ms, [n, 6] in the order of StepTimes' fields."""
        rows: NDArray[np.float64] = self._times.take(self._roster.numbers(workers), axis=0)
        return rows

    def restoring(self, workers: tuple[WorkerKey, ...]) -> NDArray[np.float64]:
        """What a token's KV takes from host memory and from disk by what the workers measured, [n, 2] in ms; 0: they do
        not know."""
        rows: NDArray[np.float64] = self._restoring.take(self._roster.numbers(workers), axis=0)
        return rows

    def learn_restoring(self, worker: WorkerKey, host_token_ms: float, disk_token_ms: float) -> None:
        """Notes what a worker with an account has measured."""
        self._restoring[self._roster.get(worker)] = host_token_ms, disk_token_ms

    def learn(self, worker: WorkerKey, times: StepTimes) -> None:
        """The worker, which has an account, takes so long for its steps."""
        self._times[self._roster.get(worker)] = astuple(times)

    def knows(self, worker: WorkerKey) -> bool:
        return worker in self._accounts

    @property
    def now_us(self) -> int:
        return int(self._clock() * 1e6)

    def forget(self, worker: WorkerKey) -> None:
        """The incarnation is gone. Requests still release their charges on it."""
        self._close_account(worker)
        self._changed.discard(worker)

    # --- what routers tell each other ---------------------------------------------------------------------------------

    def take_changed(self) -> dict[WorkerKey, Totals]:
        """This router's charges, of the workers for which they have changed since the last call."""
        changed = {worker: self._accounts[worker].own for worker in self._changed if worker in self._accounts}
        self._changed.clear()
        return changed

    def charged(self) -> dict[WorkerKey, Totals]:
        """This router's charges, of all workers that have any."""
        return {worker: account.own for worker, account in self._accounts.items() if account.own != NOTHING}

    def set_foreign(self, router: str, worker: WorkerKey, totals: Totals) -> None:
        """Another router has charged so much by now."""
        if worker not in self._accounts and totals == NOTHING:
            return
        account = self._account(worker)
        before, queued = account.by_router.get(router, NOTHING), account.queues
        account.set_foreign(router, totals)
        if account.queues and not queued:
            account.step_began_s = self._clock()  # else it would look like a worker whose step takes long
        self._stale.add(account)
        if account.own == NOTHING and not account.by_router and account.reported == NO_LOAD:
            self._close_account(worker)  # perhaps of a worker that is gone
        if totals.requests < before.requests or totals.prefill_tokens < before.prefill_tokens:
            self.relieved()

    def foreign(self, router: str) -> list[WorkerKey]:
        """Workers that another router has charged."""
        return [worker for worker, account in self._accounts.items() if router in account.by_router]

    # --- for charges --------------------------------------------------------------------------------------------------

    def changed(self, account: Account, other: Account | None = None) -> None:
        if not self._changed:
            self._has_news()
        self._changed.add(account.worker)
        self._stale.add(account)
        if other is not None and other is not account:
            self.changed(other)

    def step_begins(self, account: Account) -> None:
        """The worker begins the next prompt, as far as this router knows."""
        account.step_began_s = self._clock()
        self.changed(account)

    def blocks_taken(self, account: Account, blocks: int) -> None:
        """A prompt has its first token, for which the worker took so many blocks. Prompts of other routers are taken
        to have taken as many."""
        account.take_blocks(blocks * self.num_routers, self._clock())

    def ended(self, account: Account) -> None:
        account.end_request(self._clock())

    def expire(self) -> None:
        """Drops charges that nobody released or renewed for `charge_ttl_s`."""
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
        """Prolongs the charge. False: it was released or has expired."""
        if charge not in self._charges:
            return False
        charge.expires_s = self._clock() + self._charge_ttl_s
        self._charges.move_to_end(charge)
        return True

    def drop(self, charge: Charge) -> bool:
        """Takes the charge out of the ledger. False: it was gone already."""
        return self._charges.pop(charge, False) is None

    def _account(self, worker: WorkerKey) -> Account:
        account = self._accounts.get(worker)
        if account is None:
            account = self._accounts[worker] = Account(worker)
            if self._roster.add(worker) == len(self._columns) - 1:
                self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
                self._times = np.concatenate([self._times, np.full_like(self._times, self._profile)])
                self._restoring = np.concatenate([self._restoring, np.zeros_like(self._restoring)])
        return account

    def _close_account(self, worker: WorkerKey) -> None:
        account = self._accounts.pop(worker, None)
        if account is not None:
            self._stale.discard(account)
            number = self._roster.get(worker)
            self._columns[number], self._times[number], self._restoring[number] = 0, self._profile, 0.0
            self._roster.discard(worker)

    def _write_down(self) -> None:
        """Brings the columns up to date: when they are asked for, because many reports come between two requests."""
        now_s = self._clock()
        for account in self._stale:
            if self._accounts.get(account.worker) is account:  # a charge may outlive its worker
                row = (*account.view(), int(account.step_began_s * 1e6), *account.room(now_s))
                self._columns[self._roster.get(account.worker)] = row
        self._stale.clear()
