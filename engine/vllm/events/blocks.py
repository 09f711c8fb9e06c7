"""What a vLLM engine has cached, under Baton's names: its block hashes become block and sequence hashes. Pure.

Because vLLM's hashes differ from Baton's, Baton's are computed from the token ids and remembered by vLLM's hash. Four
differences are evened out here:

- vLLM keeps several copies of a block when requests computed it at the same time, and reports each copy; the block is
  gone with its last copy.
- vLLM may evict a block while blocks behind it stay. Baton's index holds whole prefixes only: the blocks behind are
  withdrawn, and announced again when the missing block is back.
- A model with several kinds of attention has a cache for each. A prefix is served as far as full attention has it, so
  that group's events count. Those of a sliding window name the blocks within the window alone.
- A block may depend on more than its tokens (embeddings). Such blocks, and the blocks behind them, cannot be found and
  are left out. Not so with images and adapters, which our hashes have too, and with a salt that stands for a seed of
  them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from baton_proto.kv_events import Cleared, KvEvent, Removed, Stored
from engine.vllm.events.messages import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, VllmEvent
from runtime.blocks.block_hash import SEED, block_hashes, lora_seed, sequence_hashes, with_image
from runtime.errors import ConfigError, ProtocolError

SERVED_MEDIUM = "GPU"
WHOLE_PROMPTS = ("full_attention", "mla_attention", "sink_full_attention")
"""Kinds of attention whose cache has all blocks of a prompt."""
MISFIT = "token ids that do not fill its blocks"

SeedOf = Callable[[object], int | None]
"""The seed of block hashes that a cache salt stands for; None: it stands for none."""


class _Block:
    __slots__ = ("block_hash", "copies", "name", "parent", "seed", "sequence_hash", "shown")

    def __init__(
        self, name: BlockHash, parent: BlockHash | None, block_hash: int, sequence_hash: int, seed: int
    ) -> None:
        self.name = name
        self.parent = parent  # None: the first block of a prompt
        self.block_hash = block_hash
        self.sequence_hash = sequence_hash
        self.seed = seed  # of the block hashes of its chain
        self.copies = 0
        self.shown = False  # the index knows it; then its parent is shown too


class VllmBlocks:
    """`skipped` counts, by reason, the blocks that could not be translated."""

    def __init__(self, block_size: int, seed_of: SeedOf | None = None) -> None:
        self._seed_of = seed_of or (lambda _: None)
        self.skipped: Counter[str] = Counter()
        self.num_shown = 0
        self.other_kinds: set[str] = set()  # of attention, which are not followed
        self.group: int | None = None  # which is followed: the first one with whole prompts; None: not seen yet
        self._block_size = block_size
        self._blocks: dict[BlockHash, _Block] = {}
        self._children: dict[BlockHash, dict[BlockHash, None]] = {}  # also of parents that are gone

    def apply(self, event: VllmEvent) -> list[KvEvent]:
        """What the index must be told. Raises ConfigError for blocks of another size, ProtocolError for events that
        make no sense."""
        match event:
            case BlockStored() if self._is_served(event):
                return self._store(event)
            case BlockRemoved() if self._is_served(event):
                return self._remove(event.block_hashes)
            case AllBlocksCleared():
                return self.clear()
        return []

    def clear(self) -> list[KvEvent]:
        self._blocks.clear()
        self._children.clear()
        self.num_shown = 0
        return [Cleared()]

    def runs(self) -> list[Stored]:
        """All that the index knows, parents before children."""
        runs = []
        starts = [block for block in self._blocks.values() if block.shown and block.parent is None]
        while starts:
            run = [starts.pop()]
            while children := [child for child in self._present_children(run[-1]) if child.shown]:
                run.append(children.pop())
                starts.extend(children)
            runs.append(self._run(run))
        return runs

    def _is_served(self, event: BlockStored | BlockRemoved) -> bool:
        """The event is about blocks on the GPU and the group that is followed: offloaded copies serve no prefix by
        themselves, and the caches of other groups hold the same tokens once more."""
        if event.medium not in (None, SERVED_MEDIUM):
            return False
        group = event.group_idx or 0
        if isinstance(event, BlockStored) and self.group is None:
            kind = event.kv_cache_spec_kind
            if kind in WHOLE_PROMPTS or (kind is None and group == 0):
                self.group = group
            elif kind is not None:
                self.other_kinds.add(kind)
        return group == self.group

    # --- stored -------------------------------------------------------------------------------------------------------

    def _store(self, event: BlockStored) -> list[KvEvent]:
        if len(event.token_ids) != event.block_size * len(event.block_hashes):
            self.skipped[MISFIT] += len(event.block_hashes)
            return []
        if event.block_size != self._block_size:
            raise ConfigError(
                "--block-size",
                f"vLLM's blocks hold {event.block_size} tokens, this cluster's {self._block_size}; start vLLM with "
                f"--block-size {self._block_size}",
            )
        parent = event.parent_block_hash
        if parent is not None and parent not in self._blocks:
            self.skipped["unknown parent"] += len(event.block_hashes)
            return []
        usable = self._usable(event)
        if not usable:
            return []
        return self._show_chain(self._add_copies(event, usable, self._seed(event)))

    def _usable(self, event: BlockStored) -> int:
        """How many of the run's first blocks depend on their tokens alone."""
        if event.lora_id is not None and event.lora_name is None:
            self.skipped["LoRA without a name"] += len(event.block_hashes)
            return 0
        usable = len(event.block_hashes)
        for i, keys in enumerate(event.extra_keys or ()):
            if not all(_is_adapter(event, key) or _is_image(key) or self._is_salt(event, i, key) for key in keys or ()):
                self.skipped["more than tokens in it"] += max(0, usable - i)
                usable = min(usable, i)
                break
        return usable

    def _is_salt(self, event: BlockStored, index: int, key: object) -> bool:
        """vLLM hashes a salt into the first block of a prompt."""
        return event.parent_block_hash is None and index == 0 and self._seed_of(key) is not None

    def _seed(self, event: BlockStored) -> int:
        if event.parent_block_hash is not None:
            return self._blocks[event.parent_block_hash].seed
        first = event.extra_keys[0] if event.extra_keys else None
        salts = [seed for key in first or () if (seed := self._seed_of(key)) is not None]
        return lora_seed(event.lora_name or "", salts[0] if salts else SEED)

    def _add_copies(self, event: BlockStored, usable: int, seed: int) -> list[_Block]:
        try:
            tokens = np.array(event.token_ids[: usable * self._block_size], dtype=np.uint32)
        except (OverflowError, ValueError) as error:
            raise ProtocolError("vLLM", f"token ids that are none: {error}") from error
        above = event.parent_block_hash
        blocks = block_hashes(tokens, self._block_size, seed)
        for i, keys in enumerate((event.extra_keys or ())[:usable]):
            for name, offset in filter(_is_image, keys or ()):
                blocks[i] = with_image(int(blocks[i]), name, offset)
        sequences = sequence_hashes(blocks, None if above is None else self._blocks[above].sequence_hash)
        chain = []
        for name, block_hash, sequence_hash in zip(
            event.block_hashes, blocks.tolist(), sequences.tolist(), strict=False
        ):
            block = self._blocks.get(name)
            if block is None:
                block = self._blocks[name] = _Block(name, above, block_hash, sequence_hash, seed)
                if above is not None:
                    self._children.setdefault(above, {})[name] = None
            block.copies += 1
            chain.append(block)
            above = name
        return chain

    def _show_chain(self, chain: list[_Block]) -> list[KvEvent]:
        """Announces the blocks of a chain that the index does not know yet, then the blocks that waited for them."""
        first = chain[0]
        if first.parent is not None and not self._blocks[first.parent].shown:
            return []  # until the block that is missing above is back
        events: list[KvEvent] = []
        waiting = [chain]
        while waiting:
            part = waiting.pop()
            new = [block for block in part if not block.shown]
            for run in _unbroken(new):
                events.append(self._run(run))
                self.num_shown += len(run)
            for block in new:
                block.shown = True
            for block in new:
                waiting.extend([child] for child in self._present_children(block) if not child.shown)
        return events

    # --- removed ------------------------------------------------------------------------------------------------------

    def _remove(self, names: list[BlockHash]) -> list[KvEvent]:
        hidden: list[int] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                self.skipped["unknown removal"] += 1
                continue
            block.copies -= 1
            if block.copies == 0:
                hidden += self._hide(block)
                self._forget(block)
        self.num_shown -= len(hidden)
        return [Removed(np.array(hidden, dtype="<u8").tobytes())] if hidden else []

    def _hide(self, block: _Block) -> list[int]:
        """Sequence hashes of the block and all that is shown below it, leaves first."""
        order = [block] if block.shown else []
        for above in order:  # grows meanwhile
            above.shown = False
            order.extend(child for child in self._present_children(above) if child.shown)
        return [below.sequence_hash for below in reversed(order)]

    def _forget(self, block: _Block) -> None:
        del self._blocks[block.name]
        if block.parent is not None:
            siblings = self._children[block.parent]
            del siblings[block.name]
            if not siblings:
                del self._children[block.parent]

    # --- both ---------------------------------------------------------------------------------------------------------

    def _present_children(self, block: _Block) -> Iterator[_Block]:
        return (self._blocks[name] for name in self._children.get(block.name, ()))

    def _run(self, run: list[_Block]) -> Stored:
        first = run[0]
        return Stored(
            None if first.parent is None else self._blocks[first.parent].sequence_hash,
            np.array([block.block_hash for block in run], dtype="<u8").tobytes(),
            np.array([block.sequence_hash for block in run], dtype="<u8").tobytes(),
        )


def _is_adapter(event: BlockStored, key: Any) -> bool:
    """A key is the adapter's name, or "lora", its name and its path (0.32)."""
    return key == event.lora_name or (isinstance(key, list | tuple) and [*key[:2]] == ["lora", event.lora_name])


def _is_image(key: Any) -> bool:
    """A key is the name of an image, and where it begins from the block's first token on."""
    return isinstance(key, list | tuple) and list(map(type, key)) == [str, int]


def _unbroken(blocks: list[_Block]) -> Iterator[list[_Block]]:
    """Runs in which each block is the child of the one before."""
    run: list[_Block] = []
    for block in blocks:
        if run and block.parent != run[-1].name:
            yield run
            run = []
        run.append(block)
    if run:
        yield run
