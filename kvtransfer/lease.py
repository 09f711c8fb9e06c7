"""Which of the decode worker's blocks a peer may write, and until when. A pure state machine; ledger.py drives it.

    FREE -> RESERVED -> RECEIVING -> READY          (committed: the blocks belong to a sequence)
              |            |
              v            v
             FREE      QUARANTINE -> FREE           (the writer said DRAINED, or is proven unable to write)

A lease that no writer has begun can be dropped at once, because a later BEGIN is refused. One that was begun never
becomes free by the passing of time.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class LeaseState(enum.Enum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    QUARANTINE = "quarantine"
    READY = "ready"  # ended by a commit
    FREE = "free"  # ended without one


@dataclass(slots=True)
class Lease:
    """Only the table changes it. READY and FREE leases are not in the table any more."""

    transfer_id: str
    block_ids: tuple[int, ...]
    deadline_s: float
    state: LeaseState = LeaseState.RESERVED
    writer: int | None = None  # the connection that began it


class LeaseTable:
    """All leases of one slab. Times are of the caller's monotonic clock."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._leases: dict[str, Lease] = {}
        self._holder: dict[int, str] = {}  # block -> transfer

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, transfer_id: str) -> Lease | None:
        return self._leases.get(transfer_id)

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

    def begin(self, transfer_id: str, writer: int, now_s: float) -> Lease | None:
        """RESERVED -> RECEIVING. None: unknown, begun before, cancelled or out of time; the peer must not write."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.state is not LeaseState.RESERVED or now_s >= lease.deadline_s:
            return None
        lease.state, lease.writer = LeaseState.RECEIVING, writer
        return lease

    def commit(self, transfer_id: str, writer: int) -> Lease | None:
        """RECEIVING -> READY, and the lease ends. None: it is quarantined, unknown or another writer's."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.state is not LeaseState.RECEIVING or lease.writer != writer:
            return None
        return self._end(lease, LeaseState.READY)

    def fail(self, transfer_id: str) -> Lease | None:
        """RESERVED -> FREE, RECEIVING -> QUARANTINE. None: unknown, or failed before."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.state is LeaseState.QUARANTINE:
            return None
        if lease.state is LeaseState.RESERVED:
            return self._end(lease, LeaseState.FREE)
        lease.state = LeaseState.QUARANTINE
        return lease

    def drained(self, transfer_id: str, writer: int) -> Lease | None:
        """QUARANTINE -> FREE: this writer cannot write any more. None: not quarantined, unknown or another writer's."""
        lease = self._leases.get(transfer_id)
        if lease is None or lease.state is not LeaseState.QUARANTINE or lease.writer != writer:
            return None
        return self._end(lease, LeaseState.FREE)

    def expired(self, now_s: float) -> list[Lease]:
        """Leases past their deadline that have not failed yet; the caller fails each."""
        return [lease for lease in self._running() if now_s >= lease.deadline_s]

    def next_deadline_s(self) -> float | None:
        return min((lease.deadline_s for lease in self._running()), default=None)

    def of_writer(self, writer: int) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.writer == writer]

    def check_integrity(self) -> list[str]:
        """Sentences about what is wrong; empty when all is well."""
        held = {block: lease.transfer_id for lease in self._leases.values() for block in lease.block_ids}
        problems = [] if held == self._holder else ["leased blocks and the leases' block lists disagree"]
        for lease in self._leases.values():
            if lease.state in (LeaseState.READY, LeaseState.FREE):
                problems.append(f"lease {lease.transfer_id} has ended and is still in the table")
            if (lease.writer is None) != (lease.state is LeaseState.RESERVED):
                problems.append(f"lease {lease.transfer_id} is {lease.state.value} with writer {lease.writer}")
        return problems

    def _running(self) -> list[Lease]:
        return [lease for lease in self._leases.values() if lease.state is not LeaseState.QUARANTINE]

    def _end(self, lease: Lease, state: LeaseState) -> Lease:
        lease.state = state
        del self._leases[lease.transfer_id]
        for block in lease.block_ids:
            del self._holder[block]
        return lease
