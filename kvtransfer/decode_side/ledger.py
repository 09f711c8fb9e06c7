"""The decode side's books: leases, what has arrived under each lease, and the news of both in one order.

The receiver, its clerk and the connection threads share a ledger. Methods change state and queue news; deliver() hands
events to the owner and notices to the connections. Invariant: only the receiver's own threads call deliver(), so a call
of the owner never runs the owner's callback.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from msgspec.structs import replace

from baton_proto.transfer import Commit
from kvtransfer.decode_side.arrivals import Arrivals, Progress
from kvtransfer.decode_side.events import Committed, Failed, LayerArrived, Released, TransferEvent
from kvtransfer.decode_side.lease import Lease, LeaseState, LeaseTable
from kvtransfer.slab.head_plan import Shard, sending_ranks
from kvtransfer.slab.layout import SlabLayout
from runtime.errors import ProtocolError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Notice:
    """A writer that has to be told to stop."""

    writer: int
    transfer_id: str
    reason: str


class Ledger:
    """`layout`: of the whole model, because the books count all heads of a block, whatever slabs they lie in."""

    def __init__(
        self,
        layout: SlabLayout,
        on_event: Callable[[TransferEvent], None],
        on_notice: Callable[[Notice], None],
    ) -> None:
        self._layout = layout
        self._on_event = on_event
        self._on_notice = on_notice
        self._lock = threading.Lock()
        self._table = LeaseTable(layout.num_ids)
        self._progress: dict[str, Progress] = {}
        self._news: deque[TransferEvent | Notice] = deque()
        self._delivering = threading.Lock()

    def reserve(self, transfer_id: str, block_ids: Sequence[int], deadline_s: float) -> None:
        with self._lock:
            self._table.reserve(transfer_id, block_ids, deadline_s)

    def begin(
        self, transfer_id: str, writer: int, shard: Shard, num_blocks: int, now_s: float
    ) -> tuple[int, ...] | None:
        """Returns the granted blocks; None: this writer may not write. Raises ProtocolError when it does not fit the
        grant."""
        senders = sending_ranks(shard.size, self._layout.num_kv_heads)
        with self._lock:
            lease = self._table.get(transfer_id)
            if lease is not None and len(lease.block_ids) != num_blocks:
                raise ProtocolError(
                    f"transfer {transfer_id}", f"begins with {num_blocks} blocks, granted are {len(lease.block_ids)}"
                )
            if lease is not None and lease.senders not in ((), senders):
                raise ProtocolError(
                    f"transfer {transfer_id}", f"begins as one of ranks {senders}, others began as {lease.senders}"
                )
            lease = self._table.begin(transfer_id, writer, shard.rank, senders, now_s)
            if lease is None:
                return None
            progress = self._progress.setdefault(transfer_id, Progress())
            missing = self._layout.nbytes_of(lease.block_ids) // self._layout.block_bytes
            progress.arrivals[writer] = Arrivals(self._layout.num_layers, num_blocks, missing)
            return lease.block_ids

    def arrived(self, transfer_id: str, writer: int, layers: range, first: int, count: int) -> None:
        """Books the same blocks of each layer. Raises ProtocolError when a block is written twice. Late news of a
        failed transfer are dropped."""
        with self._lock:
            lease = self._table.written_by(transfer_id, writer, LeaseState.RECEIVING)
            if lease is None:
                return
            arrivals = self._progress[transfer_id].arrivals[writer]
            for layer in layers:
                if not arrivals.mark(layer, first, count):
                    raise ProtocolError(f"transfer {transfer_id}", f"wrote a block of layer {layer} twice")
            self._news.append(LayerArrived(transfer_id, layers.start, count, lease.writers[writer], len(layers)))

    def commit(self, message: Commit, writer: int, transport: str) -> bool:
        """Returns whether the transfer has not failed. Raises ProtocolError when blocks are missing."""
        transfer_id = message.transfer_id
        with self._lock:
            lease = self._table.written_by(transfer_id, writer, LeaseState.RECEIVING)
            if lease is None:
                return False
            progress = self._progress[transfer_id]
            if missing := progress.arrivals[writer].missing:
                raise ProtocolError(f"transfer {transfer_id}", f"commits with {missing} blocks missing")
            rank = lease.writers[writer]
            progress.pushes += [replace(push, rank=rank) for push in message.pushes]
            if rank == 0:
                progress.payload, progress.transport, progress.sent_us = message.payload, transport, message.sent_us
            self._table.commit(transfer_id, writer)
            if lease.state is LeaseState.READY:
                kv_blocks = sum(block < self._layout.num_blocks for block in lease.block_ids)
                kv_bytes = self._layout.nbytes_of(lease.block_ids)
                self._news.append(
                    Committed(
                        transfer_id,
                        progress.payload,
                        progress.transport,
                        kv_blocks,
                        kv_bytes,
                        progress.sent_us,
                        progress.pushes,
                    )
                )
                del self._progress[transfer_id]
            return True

    def cancel(self, transfer_id: str, reason: str) -> None:
        """Fails a lease at the owner's wish, without a Failed event."""
        with self._lock:
            self._fail(transfer_id, reason, announce=False)

    def fail(self, transfer_id: str, reason: str) -> bool:
        """Returns False when the transfer is unknown or failed before."""
        with self._lock:
            return self._fail(transfer_id, reason, announce=True)

    def abandon(self, transfer_id: str, shard: Shard, reason: str) -> None:
        """A rank that was given the grant will not begin. No effect when it has begun on any connection."""
        senders = sending_ranks(shard.size, self._layout.num_kv_heads)
        with self._lock:
            lease = self._table.get(transfer_id)
            if lease is None:
                return
            awaited = lease.senders == senders and shard.rank in lease.unbegun
            if lease.state is LeaseState.RESERVED or awaited:
                self._fail(transfer_id, reason, announce=True)

    def expire(self, now_s: float) -> None:
        """Fails leases that have run out of time."""
        with self._lock:
            for lease in self._table.expired(now_s):
                self._fail(lease.transfer_id, "the lease ran out of time", announce=True)

    def writer_stopped(self, transfer_id: str, writer: int, reason: str) -> None:
        """The writer has written its last byte for this transfer, without a commit: the transfer fails."""
        with self._lock:
            self._fail(transfer_id, reason, announce=True, knows=writer)
            self._drained(transfer_id, writer)

    def writer_lost(self, writer: int, reason: str) -> bool:
        """The connection ended: its transfers fail. Returns whether leases are quarantined until writer_silent()."""
        with self._lock:
            leases = self._table.of_writer(writer)
            for lease in leases:
                self._fail(lease.transfer_id, reason, announce=True, knows=writer)
            return bool(leases)

    def writer_silent(self, writer: int) -> None:
        """The writer is proven unable to write any more."""
        with self._lock:
            for lease in self._table.of_writer(writer):
                self._drained(lease.transfer_id, writer)

    def transfers(self) -> list[str]:
        with self._lock:
            return [lease.transfer_id for lease in self._table.leases()]

    def next_deadline_s(self) -> float | None:
        with self._lock:
            return self._table.next_deadline_s()

    def lease_count(self) -> int:
        with self._lock:
            return len(self._table)

    def check_integrity(self, connections: set[int]) -> list[str]:
        """Sentences about what is wrong; empty when all is well. `connections`: numbers of the open ones."""
        with self._lock:
            problems = self._table.check_integrity()
            writers = {lease.transfer_id: set(lease.writers) for lease in self._table.leases() if lease.senders}
            if writers.keys() != self._progress.keys():
                problems.append("begun leases and the records of what arrived disagree")
        orphans = [transfer_id for transfer_id, writing in writers.items() if not writing <= connections]
        return problems + [f"lease {transfer_id} waits for a connection that is gone" for transfer_id in orphans]

    def deliver(self) -> None:
        """Hands queued news over, each once and in order. Any of the receiver's threads."""
        while self._news:
            with self._delivering:
                try:
                    news = self._news.popleft()
                except IndexError:
                    return
                try:
                    if isinstance(news, Notice):
                        self._on_notice(news)
                    else:
                        self._on_event(news)
                except Exception:
                    log.exception("the owner of a transfer failed on its event", transfer_event=news)

    # --- with the lock held ---

    def _fail(self, transfer_id: str, reason: str, *, announce: bool, knows: int | None = None) -> bool:
        """`knows`: a writer that needs no notice."""
        lease = self._table.fail(transfer_id)
        if lease is None:
            return False
        if announce:
            self._news.append(Failed(transfer_id, reason))
        self._news.extend(Notice(writer, transfer_id, reason) for writer in lease.writers if writer != knows)
        self._release_if_free(lease)
        return True

    def _drained(self, transfer_id: str, writer: int) -> None:
        lease = self._table.drained(transfer_id, writer)
        if lease is not None:
            self._release_if_free(lease)

    def _release_if_free(self, lease: Lease) -> None:
        if lease.state is LeaseState.FREE:
            self._progress.pop(lease.transfer_id, None)
            self._news.append(Released(lease.transfer_id))
