"""The host tiers of a tensor-parallel worker: each rank has one for its own slab, all under one block table."""

from collections.abc import Sequence

from engine.ranks.rank_commands import LoadKv, OpenTier, StoreKv, TierCommand
from engine.ranks.ranks import HANG_LIMIT_S, Ranks
from engine.tiers.host_kv import HostKv, HostTier, slot_bytes
from kvtransfer.slab.slab import Slab


class RankedTier:
    """Implements `engine.blocks.lower_tier.LowerTier` on rank 0. A copy is made on all ranks when a call returns,
    because afterwards a peer may be let in to write the blocks. Raises RankLostError."""

    def __init__(self, own: HostTier, ranks: Ranks) -> None:
        self.num_slots = own.num_slots
        self._own = own
        self._ranks = ranks
        ranks.tell(OpenTier(own.num_slots))

    spare = 0

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        told = self._ranks.tell(StoreKv(list(blocks), list(slots)))
        self._own.store(blocks, slots)
        self._ranks.wait_done(told, HANG_LIMIT_S)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        told = self._ranks.tell(LoadKv(list(slots), list(blocks)))
        self._own.load(slots, blocks)
        self._ranks.wait_done(told, HANG_LIMIT_S)

    @property
    def block_s(self) -> float:
        return self._own.block_s

    def load_s(self, num_blocks: int) -> float:
        return self._own.load_s(num_blocks)

    def close(self) -> None:
        self._own.close()


class RankTier:
    """What another rank does at rank 0's command."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._tier: HostTier | None = None

    @property
    def host(self) -> HostTier:
        """The rank's own."""
        assert self._tier is not None, "rank 0 opens the tier first"
        return self._tier

    def obey(self, command: TierCommand) -> None:
        if isinstance(command, OpenTier):
            self._tier = HostKv(self._slab, command.num_slots * slot_bytes(self._slab))
            return
        if isinstance(command, StoreKv):
            self.host.store(command.blocks, command.slots)
        else:
            self.host.load(command.slots, command.blocks)
