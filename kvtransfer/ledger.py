"""The decode side's books: leases, what has arrived under each, and the events about them in one order for the owner.

Shared by the receiver, its clerk and the connection threads. Methods change state and queue events; `deliver()` hands
the events over and is called by the receiver's own threads alone, so the owner's calls never run its callback.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from baton.errors import ProtocolError
from kvtransfer.events import Committed, Failed, LayerArrived, Released, TransferEvent
from kvtransfer.layout import SlabLayout
from kvtransfer.lease import Lease, LeaseState, LeaseTable

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Notice:
    """A writer that has to be told to stop."""

    writer: int
    transfer_id: str
    reason: str


class Arrivals:
    """Which (layer, granted block) pairs of one transfer have been written."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._seen = bytearray(num_layers * num_blocks)
        self.missing = len(self._seen)

    def mark(self, layer: int, first: int, count: int) -> bool:
        """False: one of them had been written before."""
        begin = layer * self._num_blocks + first
        if self._seen.find(1, begin, begin + count) >= 0:
            return False
        self._seen[begin : begin + count] = b"\x01" * count
        self.missing -= count
        return True


class Ledger:
    def __init__(self, layout: SlabLayout, on_event: Callable[[TransferEvent], None]) -> None:
        self._layout = layout
        self._on_event = on_event
        self._lock = threading.Lock()
        self._table = LeaseTable(layout.num_blocks)
        self._arrivals: dict[str, Arrivals] = {}
        self._events: deque[TransferEvent] = deque()
        self._delivering = threading.Lock()

    def reserve(self, transfer_id: str, block_ids: Sequence[int], deadline_s: float) -> None:
        with self._lock:
            self._table.reserve(transfer_id, block_ids, deadline_s)

    def begin(self, transfer_id: str, writer: int, num_blocks: int, now_s: float) -> tuple[int, ...] | None:
        """The granted blocks; None when this writer may not write. Raises ProtocolError when it means another grant."""
        with self._lock:
            lease = self._table.get(transfer_id)
            if lease is not None and len(lease.block_ids) != num_blocks:
                raise ProtocolError(
                    f"transfer {transfer_id}", f"begins with {num_blocks} blocks, granted are {len(lease.block_ids)}"
                )
            lease = self._table.begin(transfer_id, writer, now_s)
            if lease is None:
                return None
            self._arrivals[transfer_id] = Arrivals(self._layout.num_layers, num_blocks)
            return lease.block_ids

    def arrived(self, transfer_id: str, layer: int, first: int, count: int) -> None:
        """Raises ProtocolError when a block is written twice. Late news of a failed transfer are dropped."""
        with self._lock:
            arrivals = self._receiving(transfer_id)
            if arrivals is None:
                return
            if not arrivals.mark(layer, first, count):
                raise ProtocolError(f"transfer {transfer_id}", f"wrote a block of layer {layer} twice")
            self._events.append(LayerArrived(transfer_id, layer, count))

    def commit(self, transfer_id: str, writer: int, payload: bytes, transport: str) -> bool:
        """True: committed. False: it had failed before. Raises ProtocolError when something is missing."""
        with self._lock:
            arrivals = self._receiving(transfer_id)
            if arrivals is None:
                return False
            if arrivals.missing:
                raise ProtocolError(f"transfer {transfer_id}", f"commits with {arrivals.missing} blocks missing")
            lease = self._table.commit(transfer_id, writer)
            if lease is None:
                return False
            kv_blocks = len(lease.block_ids)
            kv_bytes = kv_blocks * self._layout.num_layers * self._layout.block_bytes
            self._events.append(Committed(transfer_id, payload, transport, kv_blocks, kv_bytes))
            del self._arrivals[transfer_id]
            return True

    def cancel(self, transfer_id: str, reason: str) -> Notice | None:
        """The owner's wish: no Failed event. The notice, if any, has to reach the writer."""
        with self._lock:
            return self._fail(transfer_id, reason, announce=False)

    def fail(self, transfer_id: str, reason: str) -> Notice | None:
        with self._lock:
            return self._fail(transfer_id, reason, announce=True)

    def abandon(self, transfer_id: str, reason: str) -> None:
        """The one who was given the grant will not use it. No effect on a lease that somebody began."""
        with self._lock:
            lease = self._table.get(transfer_id)
            if lease is not None and lease.state is LeaseState.RESERVED:
                self._fail(transfer_id, reason, announce=True)

    def expire(self, now_s: float) -> list[Notice]:
        """Fails what has run out of time."""
        reason = "the lease ran out of time"
        with self._lock:
            notices = [self._fail(lease.transfer_id, reason, announce=True) for lease in self._table.expired(now_s)]
        return [notice for notice in notices if notice is not None]

    def drained(self, transfer_id: str, writer: int) -> None:
        """The writer has written its last byte for this transfer."""
        with self._lock:
            self._release(self._table.drained(transfer_id, writer))

    def writer_lost(self, writer: int, reason: str) -> bool:
        """The connection ended: what it was receiving fails. True: leases are quarantined until writer_silent()."""
        with self._lock:
            leases = self._table.of_writer(writer)
            for lease in leases:
                self._fail(lease.transfer_id, reason, announce=True)
            return bool(leases)

    def writer_silent(self, writer: int) -> None:
        """The writer is proven unable to write any more."""
        with self._lock:
            for lease in self._table.of_writer(writer):
                self._release(self._table.drained(lease.transfer_id, writer))

    def transfers(self) -> list[str]:
        with self._lock:
            return [lease.transfer_id for lease in self._table.leases()]

    def next_deadline_s(self) -> float | None:
        with self._lock:
            return self._table.next_deadline_s()

    def lease_count(self) -> int:
        with self._lock:
            return len(self._table)

    def check_integrity(self, writers: set[int]) -> list[str]:
        """`writers`: connections that exist."""
        with self._lock:
            problems = self._table.check_integrity()
            begun = {lease.transfer_id: lease.writer for lease in self._table.leases() if lease.writer is not None}
            if begun.keys() != self._arrivals.keys():
                problems.append("begun leases and the records of what arrived disagree")
        orphans = [transfer_id for transfer_id, writer in begun.items() if writer not in writers]
        return problems + [f"lease {transfer_id} waits for a connection that is gone" for transfer_id in orphans]

    def deliver(self) -> None:
        """Hands queued events to the owner, each once, in order, whichever thread calls."""
        while self._events:
            with self._delivering:
                try:
                    event = self._events.popleft()
                except IndexError:
                    return
                try:
                    self._on_event(event)
                except Exception:
                    log.exception("the owner of a transfer failed on its event", transfer_event=event)

    def _receiving(self, transfer_id: str) -> Arrivals | None:
        lease = self._table.get(transfer_id)
        receiving = lease is not None and lease.state is LeaseState.RECEIVING
        return self._arrivals[transfer_id] if receiving else None

    def _fail(self, transfer_id: str, reason: str, *, announce: bool) -> Notice | None:
        lease = self._table.fail(transfer_id)
        if lease is None:
            return None
        if announce:
            self._events.append(Failed(transfer_id, reason))
        if lease.state is LeaseState.FREE:
            self._release(lease)
            return None
        assert lease.writer is not None
        return Notice(lease.writer, transfer_id, reason)

    def _release(self, lease: Lease | None) -> None:
        if lease is not None:
            self._arrivals.pop(lease.transfer_id, None)
            self._events.append(Released(lease.transfer_id))
