"""The prefill side of KV transfers: one link per decode worker, made when a grant needs it.

Each rank of a prefill worker has a sender, for its own slab. A transfer is one push of every rank, all begun with the
same grant; rank 0's commit carries the payload, and when one push fails the others are aborted. The transfer went well
when all its pushes did, and the source blocks are free when all its pushes are done.

Because links connect, copy and send in their own threads, begin() and ship() never wait.
"""

import threading
import time
from collections.abc import Callable, Sequence

from baton_proto.worker import Grant
from kvtransfer.prefill_side.idle_pushes import IdlePushes
from kvtransfer.prefill_side.link import Link
from kvtransfer.prefill_side.push import Push, PushResult
from kvtransfer.prefill_side.sending import LayerDone, Piece
from kvtransfer.slab.slab import EngineSlab
from kvtransfer.transports.table import check_choice, load_offered
from kvtransfer.wire.identity import SlabIdentity
from runtime.config.serving import TransferConfig
from runtime.errors import UnavailableError
from runtime.security.cluster_key import ClusterKey

CLOSE_GRACE_S = 2.0  # for aborts to reach the decode workers when the sender closes

Peer = tuple[str, int, int]  # worker id, incarnation, slab generation


class Sender:
    """Implements `kvtransfer.prefill_side.sending.KvSender`.

    A link's thread calls `on_done` of a push. On a rank that has nothing to send, because a lower rank holds the same
    heads, commit() or abort() calls it.
    """

    def __init__(
        self, slab: EngineSlab, identity: SlabIdentity, config: TransferConfig, key: ClusterKey | None = None
    ) -> None:
        """`key`: the key that receivers must show; None: any may receive. Raises ConfigError."""
        check_choice(config.transport)
        load_offered(config.transport, slab.driver.kind)
        self._key = key
        assert slab.layout == identity.slab_layout
        self._slab = slab
        self._identity = identity
        self._config = config
        self._lock = threading.Lock()
        self._links: dict[Peer, Link] = {}
        self._ending: set[Link] = set()  # retired or replaced, with pushes left
        self._idle = None if identity.shard.sends(identity.layout.num_kv_heads) else IdlePushes()
        self._closed = False

    def begin(self, grant: Grant, on_done: Callable[[PushResult], None]) -> Push:
        peer = (grant.worker_id, grant.incarnation, grant.generation)
        with self._lock:
            if self._closed:
                raise UnavailableError("the KV sender is closed")
            if self._idle is not None:
                return self._idle.add(grant, on_done)
            link = self._links.get(peer)
            push = link.add(grant, on_done) if link else None
            if push is not None:
                return push
            self._retire_older(grant)
            link = Link(self._slab, self._identity, self._config, grant, self._forget, self._key)
            push = link.add(grant, on_done)
            assert push is not None
            link.start()
            self._links[peer] = link
            return push

    def ship(self, pieces: Sequence[Piece]) -> LayerDone:
        for piece in pieces:
            if piece.tail:
                self._slab.clear_behind(piece.source[-1], piece.tail)

        def layer_done(layer: int) -> None:
            ready, ids = self._slab.mark(), self._slab.layout.layer_blocks(layer)
            for piece in pieces:
                if piece.source[0] in ids:
                    piece.push.layer_ready(layer, piece.first, piece.source, ready)

        return layer_done

    def let_go(self, timeout_s: float) -> None:
        with self._lock:
            links = [*self._links.values(), *self._ending]
        give_up_s = time.monotonic() + timeout_s
        for link in links:
            link.retire()
        for link in links:
            if not link.wait(max(0.0, give_up_s - time.monotonic())):
                raise UnavailableError(f"a push still reads the KV slab after {timeout_s:.1f} s")

    def identify(self, identity: SlabIdentity) -> None:
        with self._lock:
            self._identity = identity

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links = [*self._links.values(), *self._ending]
        if self._idle is not None:
            self._idle.close("the prefill worker is closing")
        for link in links:
            link.retire("the prefill worker is closing")
        for link in links:
            link.join(CLOSE_GRACE_S)

    def _retire_older(self, grant: Grant) -> None:
        """Earlier links of the worker take no more pushes, because it has restarted or slept."""
        for peer in [peer for peer in self._links if peer[0] == grant.worker_id]:
            link = self._links.pop(peer)
            link.retire()
            self._ending.add(link)

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._ending.discard(link)
            for peer in [peer for peer, other in self._links.items() if other is link]:
                del self._links[peer]
