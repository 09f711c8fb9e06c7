"""Which of the decode worker's blocks its peers may write, and until when. A pure state machine; ledger.py drives it.

    FREE -> RESERVED -> RECEIVING -> READY          (every rank of the sender committed: the blocks are a sequence's)
              |            |
              v            v
             FREE      QUARANTINE -> FREE           (every writer committed, said DRAINED or is proven unable to write)

A writer is one rank of the prefill worker, on a connection of its own. A lease that no writer has begun is dropped at
once, because a later BEGIN is refused. Invariant: a lease that was begun never becomes free by the passing of time.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class LeaseState(enum.Enum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    QUARANTINE = "quarantine"
    READY = "ready"  # ended by the last commit
    FREE = "free"  # ended without one


@dataclass(slots=True)
class Lease:
    """Invariant: only the table changes a lease. A READY or FREE lease is in the table no more."""

    transfer_id: str
    block_ids: tuple[int, ...]
    deadline_s: float
    state: LeaseState = LeaseState.RESERVED
    senders: tuple[int, ...] = ()  # the ranks that have to commit, as the first one that began said
    unbegun: set[int] = field(default_factory=set)  # senders that have not begun
    writers: dict[int, int] = field(default_factory=dict)  # connection -> rank, of the writers that may write now


class LeaseTable:
    """All leases of one slab. Times are on the caller's monotonic clock. `writer` is a connection's number."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._leases: dict[str, Lease] = {}
        self._holder: dict[int, str] = {}  # block -> transfer

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, transfer_id: str) -> Lease | None:
        return self._leases.get(transfer_id)

    def written_by(self, transfer_id: str, writer: int, state: LeaseState) -> Lease | None:
        """The lease, when it is in this state and this writer may write it."""
        lease = self._leases.get(transfer_id)
        return lease if lease is not None and lease.state is state and writer in lease.writers else None

    def leases(self) -> list[Lease]:
        return list(self._leases.values())

    def reserve(self, transfer_id: str, block_ids: Sequence[int], deadline_s: float) -> Lease:
        assert transfer_id not in self._leases
        assert len(set(block_ids)) == len(block_ids), "a block is listed twice"
        for block in block_ids:
            assert 0 <= block < self.num_blocks, f"block {block} is outside the slab"
            assert block not in self._holder, f"block {block} is leased already, to {self._holder[block]}"
        lease = Lease(transfer_id, tuple(block_ids), deadline_s)
        self._leases[transfer_id] = lease
        self._holder.update(dict.fromkeys(block_ids, transfer_id))
        return lease

    def begin(self, transfer_id: str, writer: int, rank: int, senders: tuple[int, ...], now_s: float) -> Lease | None:
        """One of `senders` begins: RESERVED or RECEIVING -> RECEIVING.

        None, and the peer must not write: the lease is unknown, has failed, is out of time or has other senders, or the
        rank has begun before.
        """
        assert rank in senders
        lease = self._leases.get(transfer_id)
        if lease is None or lease.state is LeaseState.QUARANTINE or now_s >= lease.deadline_s:
            return None
        if lease.state is LeaseState.RESERVED:
            lease.state, lease.senders, lease.unbegun = LeaseState.RECEIVING, senders, set(senders)
        if lease.senders != senders or rank not in lease.unbegun:
            return None
        lease.unbegun.remove(rank)
        lease.writers[writer] = rank
        return lease

    def commit(self, transfer_id: str, writer: int) -> Lease | None:
        """This writer has written all it had to. With the last writer RECEIVING -> READY, and the lease ends.

        None: the lease is quarantined, unknown, or not this writer's.
        """
        lease = self.written_by(transfer_id, writer, LeaseState.RECEIVING)
        if lease is None:
            return None
        del lease.writers[writer]
        return lease if lease.writers or lease.unbegun else self._end(lease, LeaseState.READY)

    def fail(self, transfer_id: str) -> Lease | None:
        """RESERVED -> FREE; RECEIVING -> QUARANTINE, or FREE when nobody writes. None: unknown, or failed before."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.state is LeaseState.QUARANTINE:
            return None
        lease.state = LeaseState.QUARANTINE
        return lease if lease.writers else self._end(lease, LeaseState.FREE)

    def drained(self, transfer_id: str, writer: int) -> Lease | None:
        """This writer cannot write any more. With the last writer QUARANTINE -> FREE.

        None: the lease is not quarantined, unknown, or not this writer's.
        """
        lease = self.written_by(transfer_id, writer, LeaseState.QUARANTINE)
        if lease is None:
            return None
        del lease.writers[writer]
        return lease if lease.writers else self._end(lease, LeaseState.FREE)

    def expired(self, now_s: float) -> list[Lease]:
        """Leases past their deadline that have not failed yet; the caller fails each."""
        return [lease for lease in self._running() if now_s >= lease.deadline_s]

    def next_deadline_s(self) -> float | None:
        return min((lease.deadline_s for lease in self._running()), default=None)

    def of_writer(self, writer: int) -> list[Lease]:
        """The leases that the writer may write."""
        return [lease for lease in self._leases.values() if writer in lease.writers]

    def check_integrity(self) -> list[str]:
        """Sentences about what is wrong; empty when all is well."""
        held = {block: lease.transfer_id for lease in self._leases.values() for block in lease.block_ids}
        problems = [] if held == self._holder else ["leased blocks and the leases' block lists disagree"]
        return problems + [
            f"lease {lease.transfer_id} is {lease.state.value} with writers {lease.writers}, "
            f"of ranks {lease.senders} not begun: {lease.unbegun}"
            for lease in self._leases.values()
            if not _is_sound(lease)
        ]

    def _running(self) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.state is not LeaseState.QUARANTINE]

    def _end(self, lease: Lease, state: LeaseState) -> Lease:
        lease.state = state
        del self._leases[lease.transfer_id]
        for block in lease.block_ids:
            del self._holder[block]
        return lease


def _is_sound(lease: Lease) -> bool:
    """Whether a lease in the table has the writers that its state allows."""
    ranks = list(lease.writers.values())
    if len(set(ranks)) < len(ranks) or not {*ranks, *lease.unbegun} <= set(lease.senders) or lease.unbegun & {*ranks}:
        return False
    match lease.state:
        case LeaseState.RESERVED:
            return not lease.senders
        case LeaseState.RECEIVING:
            return bool(ranks or lease.unbegun)
    return lease.state is LeaseState.QUARANTINE and bool(ranks)  # in the other states it has ended
