"""KV blocks in host memory: a second home for prefixes that the slab has no room for."""

import os
from collections.abc import Sequence

import numpy as np

from kvtransfer.slab.slab import Slab
from runtime.config.serving import EngineConfig, parse_bytes
from runtime.device.driver import MemoryKind
from runtime.errors import ConfigError

AUTO_FACTOR = 4  # times the slab
KEY = "engine.host_kv_memory"


class HostKv:
    """Implements `engine.core.block_manager.LowerTier` for a slab that lies in this host's memory itself. A slot holds
    one block of all layers. Memory is taken when a slot is first written. Owned by the engine thread."""

    def __init__(self, slab: Slab, nbytes: int) -> None:
        """nbytes: of host memory, in whole blocks."""
        layout = slab.layout
        self.slot_bytes = slot_bytes(slab)
        self.num_slots = nbytes // self.slot_bytes
        self._slab = slab
        self._slots = np.empty((self.num_slots, layout.num_layers, layout.block_bytes), dtype=np.uint8)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        device = self._blocks()
        for block, slot in zip(blocks, slots, strict=True):
            self._slots[slot] = device[:, block]

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        device = self._blocks()
        for slot, block in zip(slots, blocks, strict=True):
            device[:, block] = self._slots[slot]

    def content(self, slot: int) -> memoryview:
        """The bytes of a slot, for the disk tier. From any thread."""
        return memoryview(self._slots[slot]).cast("B")

    def _blocks(self) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        """The slab as [layers, blocks, bytes of a block in a layer]."""
        layout = self._slab.layout
        return np.frombuffer(self._slab.buffer, np.uint8).reshape(layout.num_layers, layout.num_blocks, -1)


def host_kv(slab: Slab, config: EngineConfig, ranks: int) -> HostKv | None:
    """As configured, None for 0. ranks: of all workers of this machine, which share its memory. Raises ConfigError."""
    check_host_kv(config, slab.driver.kind)
    text = config.host_kv_memory.strip()
    if text == "auto":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        nbytes = min(AUTO_FACTOR * slab.layout.nbytes, free // 2 // ranks)
    else:
        nbytes = parse_bytes(text, KEY)
    if nbytes == 0:
        return None
    tier = HostKv(slab, nbytes)
    if not tier.num_slots:
        raise ConfigError(KEY, f"{text} is less than one KV block, {slot_bytes(slab)} bytes: 0 turns it off")
    return tier


def check_host_kv(config: EngineConfig, memory: MemoryKind) -> None:
    """Raises ConfigError where there is no such tier."""
    if config.host_kv_memory.strip() != "0" and memory != "host":
        raise ConfigError(KEY, "only CPU workers have a host tier: leave it at 0")


def slot_bytes(slab: Slab) -> int:
    """Bytes of one block in all layers."""
    return slab.layout.num_layers * slab.layout.block_bytes
