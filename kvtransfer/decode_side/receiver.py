"""The decode side of KV transfers: grants blocks, listens for prefill workers, reports what arrives.

A decode worker has one receiver for all of its ranks. Its threads are the door, where newcomers prove that they have
the key and say Hello, one for each connection that has said it, and the clerk, which watches the clock.
"""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from baton_proto import transfer as wire
from baton_proto.discovery import TransferEndpoint
from baton_proto.worker import Grant
from kvtransfer.decode_side.connection import Connection, Reception
from kvtransfer.decode_side.events import TransferEvent
from kvtransfer.decode_side.ledger import Ledger, Notice
from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.head_plan import fits
from kvtransfer.slab.slab import EngineSlab
from kvtransfer.transports.table import check_choice, load_offered, offered
from kvtransfer.wire.framing import decoded
from kvtransfer.wire.identity import SlabIdentity
from kvtransfer.wire.proving import frame, proof
from kvtransfer.wire.sockets import BACKLOG, listen_unix, secured
from runtime.address import format_address
from runtime.config.serving import TransferConfig
from runtime.errors import ProtocolError, UnavailableError
from runtime.host import host_id
from runtime.processes.owned_folder import OwnedFolder, temporary_folder
from runtime.security.cluster_key import ClusterKey
from runtime.security.handshake import KV_PLANE, listening
from runtime.streams.door import Door, Talk, listen_tcp

log = structlog.get_logger()

MAX_HELLO_BYTES = 16384
CLOSE_GRACE_S = 2.0  # for prefill workers to let go of the slab when the receiver closes


class Receiver:
    """The receiver's threads call `on_event`, one event at a time and in order; it must not block.

    Invariant: every reserve() ends in exactly one of Committed (the blocks belong to the owner's sequence) or Released
    (the blocks may be reused). Failed may come long before Released: until then the blocks are quarantined.
    """

    def __init__(
        self,
        slab: EngineSlab,
        identity: SlabIdentity,
        config: TransferConfig,
        host: str,
        on_event: Callable[[TransferEvent], None],
        others: Sequence[AdoptedSlab] = (),
        key: ClusterKey | None = None,
        reached_at: str | None = None,
    ) -> None:
        """`reached_at`: the host that senders connect to; None: `host`.

        `slab` is rank 0's, `others` are those of ranks 1, 2, ...; a block has the same id in all of them. `key`:
        the key that senders must show; None: any may send. Raises ConfigError, or OSError when it cannot listen."""
        check_choice(config.transport)
        load_offered(config.transport, slab.driver.kind)
        assert fits(identity.shard.size, identity.layout.num_kv_heads)
        layouts = [slab.layout, *(other.layout for other in others)]
        assert layouts == [identity.slab_layout] * identity.shard.size
        self._ledger = Ledger(identity.layout, on_event, self._tell)
        self._wake = threading.Event()
        self._lock = threading.Lock()  # guards the connections and the closed flag
        self._connections: dict[int, Connection] = {}
        self._num_accepted = 0
        self._closed = False
        self._suspended = False
        self._last_round = False  # the clerk ends after what is queued now
        self._shared = Reception(
            slab=slab,
            slabs=[slab, *others],
            identity=identity,
            config=config,
            offered=offered(config.transport, slab.driver.kind),
            ledger=self._ledger,
            closing_fd=os.eventfd(0, os.EFD_CLOEXEC),
        )
        self._key = key
        self._folder: OwnedFolder | None = None
        self.endpoint, listeners = self._listen(host, reached_at or host)
        self._door = Door("kv-door", listeners, self._greeting, config.connect_timeout_s, self._come_in, self._secured)
        self._clerk = threading.Thread(target=self._keep_watch, name="kv-clerk", daemon=True)
        self._clerk.start()

    def reserve(
        self, block_ids: Sequence[int], skip_tokens: int, ttl_s: float | None = None, num_window_blocks: int = 0
    ) -> Grant:
        """Leases free blocks of the owner to any sender that presents the grant. `ttl_s` None: the configured time to
        live. Raises UnavailableError when closed or suspended."""
        shared = self._shared
        assert skip_tokens % shared.slab.layout.block_size == 0
        ttl_s = shared.config.lease_ttl_s if ttl_s is None else ttl_s
        transfer_id = uuid.uuid4().hex  # unguessable, because a writer shows nothing else
        with self._lock:
            suspended = self._suspended or any(slab.suspended for slab in shared.slabs)
            if self._closed or suspended:
                raise UnavailableError("the KV receiver is closed" if self._closed else "the KV slab is suspended")
            self._ledger.reserve(transfer_id, block_ids, time.monotonic() + ttl_s)
        self._wake.set()
        return Grant(
            transfer_id=transfer_id,
            worker_id=shared.identity.worker_id,
            incarnation=shared.identity.incarnation,
            generation=shared.slab.generation,
            block_ids=list(block_ids),
            skip_tokens=skip_tokens,
            ttl_s=ttl_s,
            endpoint=self.endpoint,
            num_window_blocks=num_window_blocks,
        )

    def cancel(self, transfer_id: str, reason: str) -> None:
        """Ends a lease that is not committed: Released follows, at once or when the peer has stopped. Idempotent."""
        self._ledger.cancel(transfer_id, reason)
        self._wake.set()

    def lease_count(self) -> int:
        """Leases that have not ended, quarantined ones included."""
        return self._ledger.lease_count()

    @property
    def problem(self) -> str:
        """Why nothing can arrive here any more; empty when all is well."""
        dead = [name for name, alive in (("door", self._door.open), ("clerk", self._clerk.is_alive())) if not alive]
        return f"the KV receiver's {dead[0]} thread has ended" if dead and not self._closed else ""

    def check_integrity(self) -> list[str]:
        """Sentences about what is wrong; empty when all is well."""
        with self._lock:
            return self._ledger.check_integrity(set(self._connections))

    def suspend(self, timeout_s: float) -> None:
        """Until resume() nobody may write or map the slab: open leases fail, and peers let go.

        Raises UnavailableError, and goes on as before, when a peer does not let go within `timeout_s`.
        """
        with self._lock:
            if self._closed:
                raise UnavailableError("the KV receiver is closed")
            self._suspended = True
            connections = list(self._connections.values())
        for transfer_id in self._ledger.transfers():
            self._ledger.fail(transfer_id, "the decode worker goes to sleep")
        self._hang_up(connections, timeout_s)
        with self._lock:
            left = [connection.peer for connection in self._connections.values()]
        if left or self._ledger.lease_count():
            self.resume()
            holders = ", ".join(left) or "an unknown peer"
            raise UnavailableError(f"{holders} did not let go of the KV slab within {timeout_s:.1f} s")

    def identify(self, identity: SlabIdentity) -> None:
        """Who the worker is from now on, while suspended: its weights are others."""
        assert self._suspended
        self._shared = replace(self._shared, identity=identity)

    def resume(self) -> None:
        """Leases are given out again, under the slab's present generation."""
        self._suspended = False

    def close(self) -> None:
        """Fails open leases, gives peers CLOSE_GRACE_S to let go of the slab, ends sockets and threads. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections.values())
        self._door.close(CLOSE_GRACE_S)
        for transfer_id in self._ledger.transfers():
            self._ledger.fail(transfer_id, "the decode worker is closing")
        self._last_round = True
        self._hang_up(connections, CLOSE_GRACE_S)
        os.eventfd_write(self._shared.closing_fd, 1)
        for connection in connections:
            connection.join(CLOSE_GRACE_S)
        self._clerk.join(CLOSE_GRACE_S)
        os.close(self._shared.closing_fd)
        if self._folder is not None:
            self._folder.close()

    def _hang_up(self, connections: Sequence[Connection], timeout_s: float) -> None:
        """Waits until the peers are proven unable to write, for `timeout_s` in all."""
        for connection in connections:
            connection.shutdown()
        self._wake.set()
        give_up_s = time.monotonic() + timeout_s
        for connection in connections:
            connection.join(max(0.0, give_up_s - time.monotonic()))

    def _listen(self, host: str, reached_at: str) -> tuple[TransferEndpoint, list[socket.socket]]:
        """Listens on the sockets that the offered transports need."""
        unix_path = tcp_address = ""
        listeners = []
        needed = {transport.socket for transport in self._shared.offered}
        if "unix" in needed:
            self._folder = temporary_folder("baton-kv-")  # ours alone: who can connect can write the slab
            unix_path = str(self._folder.path / "kv.sock")
            listeners.append(listen_unix(unix_path))
        if "tcp" in needed:
            listeners.append(listen_tcp(host, BACKLOG))
            tcp_address = format_address(reached_at, listeners[-1].getsockname()[1])
        names = tuple(transport.name for transport in self._shared.offered)
        return TransferEndpoint(host_id(), unix_path, tcp_address, names), listeners

    def _secured(self, sock: socket.socket) -> socket.socket:
        return secured(sock, self._key)

    def _greeting(self, sock: socket.socket) -> Talk[wire.Hello]:
        """Raises ProtocolError when the peer has another key or does not say Hello."""
        if self._key is not None:
            yield from proof(sock, listening(self._key, KV_PLANE, "a stranger"))
        hello = decoded(wire.decode_to_decode, (yield from frame(sock, MAX_HELLO_BYTES)), "a stranger")
        if not isinstance(hello, wire.Hello):
            raise ProtocolError("a stranger", f"opened with {type(hello).__name__}, not Hello")
        return hello

    def _come_in(self, sock: socket.socket, hello: wire.Hello) -> None:
        with self._lock:
            if self._closed or self._suspended:
                sock.close()
                return
            self._num_accepted += 1
            connection = Connection(sock, hello, self._num_accepted, self._shared, self._forget)
            connection.start()
            self._connections[connection.number] = connection

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.pop(connection.number, None)

    def _tell(self, notice: Notice) -> None:
        with self._lock:
            connection = self._connections.get(notice.writer)
        if connection is not None:  # else the connection's end has stopped the writer
            connection.tell(notice)
            self._wake.set()  # the clerk watches whether the peer obeys

    def _keep_watch(self) -> None:
        """The clerk: does what is due by the clock, and what reserve() and cancel() ask for."""
        while True:
            self._wake.clear()
            last_round = self._last_round
            self._ledger.expire(time.monotonic())
            self._ledger.deliver()
            due_s = self._cut_off_the_deaf()
            if last_round:
                return
            self._wake.wait(None if due_s is None else max(0.0, due_s - time.monotonic()))

    def _cut_off_the_deaf(self) -> float | None:
        """Ends connections whose peers were told to stop and did not. Returns when to look again."""
        with self._lock:
            connections = list(self._connections.values())
        due_s = [self._ledger.next_deadline_s()]
        for connection in connections:
            drain_by_s = connection.drain_by_s()
            if drain_by_s is not None and drain_by_s <= time.monotonic():
                log.error("a prefill worker does not drain; its connection is cut", peer=connection.peer)
                connection.shutdown()
            else:
                due_s.append(drain_by_s)
        return min((due for due in due_s if due is not None), default=None)
