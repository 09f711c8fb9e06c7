"""The host tiers of several ranks: a rank that lags behind rank 0."""

import threading
from typing import cast

import numpy as np

from engine.ranks.rank_commands import LoadKv, StoreKv, TierCommand
from engine.ranks.ranked_tier import RankedTier, RankTier
from engine.ranks.ranks import Ranks
from engine.tiers.host_kv import HostKv
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab

LAYOUT = SlabLayout(2, 4, 1, 4, 8, "float32")


class LaggingRanks:
    """One more rank, which carries out a command a moment after rank 0 has told it."""

    def __init__(self, slab: Slab) -> None:
        self._tier = RankTier(slab)
        self._threads: list[threading.Timer] = []

    def tell(self, command: TierCommand) -> int:
        late = isinstance(command, StoreKv | LoadKv)
        self._threads.append(threading.Timer(0.2 if late else 0.0, self._tier.obey, (command,)))
        self._threads[-1].start()
        return len(self._threads)

    def wait_done(self, sequence: int, timeout_s: float) -> None:
        self._threads[sequence - 1].join(timeout_s)


def test_a_peer_that_writes_a_block_after_its_copy_was_asked_for_spoils_no_ranks_copy() -> None:
    """As a prefill worker does with blocks that a decode worker has evicted and granted."""
    own, others = Slab(LAYOUT), Slab(LAYOUT)
    tier = RankedTier(HostKv(own, LAYOUT.nbytes), cast(Ranks, LaggingRanks(others)))
    for slab in (own, others):
        slab.buffer[:] = bytes([7]) * LAYOUT.nbytes
    tier.store([1], [0])
    others.buffer[:] = bytes(LAYOUT.nbytes)
    tier.load([0], [2])
    others_kv = np.frombuffer(others.buffer, np.uint8).reshape(LAYOUT.num_layers, LAYOUT.num_blocks, -1)
    assert (others_kv[:, 2] == 7).all()
    assert not others_kv[:, [0, 1, 3]].any()
