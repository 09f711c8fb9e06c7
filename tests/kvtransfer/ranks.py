"""Workers of several ranks for tests: prefill ranks in processes of their own; of a decode worker, all but rank 0."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from baton_proto.worker import Grant
from kvtransfer.slab.adopted_slab import AdoptedSlab
from kvtransfer.slab.head_plan import Shard
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.wire.identity import SlabIdentity
from runtime.config.serving import TransferConfig
from runtime.device.host_memory import HostMemory
from tests.kvtransfer.peers import Decode, PeerProcess, fill, patient
from tests.kvtransfer.reference import Words, heads_of, rank_words, reference

LAYOUT = SlabLayout(num_layers=3, num_blocks=24, num_kv_heads=8, block_size=4, head_dim=8, dtype="float32")
PREFILL_BLOCKS = 40
SEED = 17
POISON = 1000  # seed of what lies in the decode worker's slabs before


def config_of(transport: str, **settings: Any) -> TransferConfig:
    return patient(transport=transport, **settings)


class RankProcesses:
    """Children that serve all tests of a file: each is a rank of another worker in every one."""

    def __init__(self) -> None:
        self._children: dict[str, list[PeerProcess]] = {"prefill-rank": [], "decode-rank": []}

    def take(self, role: str, count: int) -> list[PeerProcess]:
        children = self._children[role]
        while len(children) < count:
            children.append(PeerProcess(role))
        return children[:count]

    def close(self) -> None:
        for children in self._children.values():
            for child in children:
                child.close()


class PrefillRanks:
    """A prefill worker whose rank r is `children[r]`. Its slabs hold `reference(self.layout, SEED)`.

    `size`: where there are more ranks than children.
    """

    def __init__(self, children: list[PeerProcess], num_kv_heads: int, config: TransferConfig, size: int = 0) -> None:
        self.children = children
        self.layout = replace(LAYOUT, num_kv_heads=num_kv_heads, num_blocks=PREFILL_BLOCKS)
        for rank, child in enumerate(children):
            place = {"rank": rank, "size": size or len(children), "worker_id": "prefill-0"}
            child.tell(do="open", layout=self.layout, seed=SEED, config=config, **place)
        for child in children:
            assert child.hear() == {"did": "open"}

    def tell(self, do: str, **message: Any) -> None:
        for child in self.children:
            child.tell(do=do, **message)

    def commit(self, grant: Grant, payload: str) -> None:
        for rank, child in enumerate(self.children):
            child.tell(do="commit", push=grant.transfer_id, payload="" if rank else payload)

    def push(self, grant: Grant, source: Sequence[int], payload: str = "first token") -> list[dict[str, Any]]:
        """A whole transfer in two chunks, block i of the grant from source[i]; how it ended for each rank."""
        self.tell("begin", grant=grant)
        half = len(source) // 2
        for first, blocks in ((0, source[:half]), (half, source[half:])):
            for layer in range(self.layout.num_layers):
                self.tell("layer", push=grant.transfer_id, layer=layer, first=first, source=blocks)
        self.commit(grant, payload)
        return self.results()

    def results(self) -> list[dict[str, Any]]:
        return [child.hear() for child in self.children]

    def close(self) -> None:
        self.tell("close")
        for child in self.children:
            assert child.hear() == {"did": "close"}


class DecodeRanks(Decode):
    """A decode worker whose rank 0 is this process and whose rank r is `children[r - 1]`. Its slabs hold noise."""

    def __init__(self, children: list[PeerProcess], num_kv_heads: int, config: TransferConfig) -> None:
        self._children = children
        self.layout = replace(LAYOUT, num_kv_heads=num_kv_heads)
        self.size = len(children) + 1
        identity = SlabIdentity("decode-0", 7, "model", self.layout, Shard(0, self.size))
        self.others: list[AdoptedSlab] = []
        for rank, child in enumerate(children, 1):
            place = {"rank": rank, "size": self.size, "worker_id": "decode-0"}
            child.tell(do="open", layout=self.layout, seed=POISON + rank, **place)
            with self._export(child) as fd:
                self.others.append(AdoptedSlab(identity.slab_layout, HostMemory(), fd.fileno(), f"rank {rank}"))
        super().__init__(config, identity, self.others)
        fill(self.slab, POISON)

    def renew_others(self) -> None:
        """What sleep and wake do to the other ranks."""
        for slab, child in zip(self.others, self._children, strict=True):
            slab.suspend()
            child.tell(do="renew")
            with self._export(child) as fd:
                slab.resume(fd.fileno())

    def assert_holds(self, kv: Words, source: Sequence[int], granted: Sequence[int], *, noise: bool = True) -> None:
        """The granted blocks hold their heads of blocks `source` of `kv`, and all other bytes are still noise, or 0."""
        for rank in range(self.size):
            expected = reference(self.slab.layout, POISON + rank) * np.uint32(noise)
            held = heads_of(rank, self.size, self.layout.num_kv_heads)
            expected[:, list(granted)] = kv[:, list(source)][:, :, held]
            if rank == 0:
                assert np.array_equal(rank_words(self.slab), expected)
            else:
                self._children[rank - 1].tell(do="digest")
                assert self._children[rank - 1].hear() == {"digest": xxhash.xxh3_64_hexdigest(expected.tobytes())}

    def assert_untouched(self) -> None:
        self.assert_holds(reference(self.layout, SEED), [], [])

    def close(self) -> None:
        super().close()
        for slab in self.others:
            slab.close()

    def _export(self, child: PeerProcess) -> Any:
        """The rank's slab, as the engine's channel between ranks would bring its descriptor."""
        return open(f"/proc/{child.process.pid}/fd/{child.hear()['fd']}", "r+b", buffering=0)
