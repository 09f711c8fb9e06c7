"""KV blocks in host memory: a second home for prefixes that the slab has no room for."""

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import structlog

from engine.blocks.lower_tier import LowerTier
from engine.tiers.slot_layout import SlotLayout, bytes_of_slots
from kvtransfer.slab.slab import Slab
from runtime.config.serving import EngineConfig, parse_bytes
from runtime.device.available_memory import available_bytes
from runtime.errors import ConfigError, UnavailableError

AUTO_FACTOR = 4  # times the slab
KEY = "engine.host_kv_memory"

log = structlog.get_logger()


class HostTier(LowerTier, Protocol):
    """A slot holds one block of all layers that have it."""

    slot_bytes: int
    window_slot_bytes: int

    def content(self, slot: int) -> memoryview:
        """The bytes of a slot, for the disk tier. From any thread, which waits for copies of the slot."""


class HostKv:
    """Implements `HostTier` for a slab that lies in this host's memory itself. Memory is taken when a slot is first
    written. Owned by the engine thread."""

    spare = 0

    def __init__(self, slab: Slab, nbytes: int) -> None:
        """nbytes: of host memory, in whole blocks."""
        self._layout = layout = SlotLayout(slab.layout, nbytes)
        self.slot_bytes, self.window_slot_bytes = layout.slot_bytes, layout.window_slot_bytes
        self.num_slots, self.num_window_slots = layout.num_slots, layout.num_window_slots
        self.block_s = 0.0
        self._slab = slab
        self._rows = np.empty((layout.num_rows, layout.block_bytes), dtype=np.uint8)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        device = self._slab_rows()
        for block, slot in zip(blocks, slots, strict=True):
            group = self._layout.group_of(slot)
            # "clip" only because "raise" copies twice.
            device.take(group.slab_rows(block), 0, self._rows[group.host_rows(slot)], "clip")

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        began_s, device = time.perf_counter(), self._slab_rows()
        for slot, block in zip(slots, blocks, strict=True):
            group = self._layout.group_of(slot)
            device[group.slab_rows(block)] = self._rows[group.host_rows(slot)]
        if slots:
            took_s = (time.perf_counter() - began_s) / len(slots)
            self.block_s = 0.9 * self.block_s + 0.1 * took_s if self.block_s else took_s

    def load_s(self, num_blocks: int) -> float:
        return 0.0  # a copy within memory is far sooner than any computation

    def close(self) -> None:
        """The memory goes with this object."""

    def content(self, slot: int) -> memoryview:
        return self._rows[self._layout.host_rows(slot)].reshape(-1).data

    def _slab_rows(self) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
        """The slab as rows of one block in one layer."""
        return np.frombuffer(self._slab.buffer, np.uint8).reshape(-1, self._layout.block_bytes)


def host_kv(slab: Slab, config: EngineConfig, ranks: int) -> HostTier | None:
    """Takes the host tier's memory as configured; None for 0. ranks: the number of ranks of all workers of this
    machine, which share its memory. Raises ConfigError."""
    text, least = config.host_kv_memory.strip(), bytes_of_slots(slab.layout, 1)
    if text == "auto":
        nbytes = min(AUTO_FACTOR * slab.layout.nbytes, available_bytes() // 2 // ranks)
        if nbytes < least:
            log.warning("no host tier: too little memory is free", bytes=nbytes, block_bytes=least)
            return None
    else:
        nbytes = parse_bytes(text, KEY)
    if nbytes == 0:
        return None
    if nbytes < least:
        raise ConfigError(KEY, f"{text} is less than one KV block, {least} bytes: 0 turns it off")
    try:
        return tier_of(slab, nbytes)
    except (UnavailableError, MemoryError) as error:
        raise ConfigError(KEY, f"{text}: {error}") from error


def tier_of(slab: Slab, nbytes: int) -> HostTier:
    """Takes so much host memory for the slab's blocks. Raises UnavailableError or MemoryError."""
    if slab.driver.kind == "host":
        return HostKv(slab, nbytes)
    from engine.tiers.gpu_kv import GpuHostKv  # here: torch and cuda-bindings are there only where a GPU is

    return GpuHostKv(slab, nbytes)
