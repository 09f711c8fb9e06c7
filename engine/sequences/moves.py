"""Copies between the device and the lower tier that go on while steps run, and the blocks that they touch.

Whoever uses such a block next comes after the copy: a step waits on the device, layer by layer where it can; a peer
that writes the block is not let in before. So a block may be given away as soon as its copy is under way.
"""

from collections.abc import Callable, Iterable, Sequence as Run
from typing import Protocol

BEFORE_STEP = -1


class Move(Protocol):
    """Copies of some blocks, in all layers. Only `wait` may be called from any thread. All but `then` raise what keeps
    copies from being enqueued, after which the engine cannot go on."""

    def is_enqueued(self) -> bool:
        """Whether the device knows of all the copies, so that a step may be launched that comes after them."""

    def left_s(self) -> float:
        """About how long they go on; 0 when they have ended."""

    def before(self, layer: int) -> None:
        """What a step enqueues from now on comes after the copies that its work in this layer needs; BEFORE_STEP: that
        any of its work needs, which waits until all copies are enqueued. Called in the order of the layers."""

    def then(self, wake: Callable[[], object]) -> None:
        """Calls `wake` on some thread when they have ended."""

    def wait(self) -> None:
        """Returns when they have ended."""


class Moves:
    """The moves under way, by device block. Engine thread only."""

    def __init__(self) -> None:
        self._of: dict[int, Move] = {}  # the last one of each block
        self._blocks: dict[Move, Run[int]] = {}

    def add(self, move: Move | None, blocks: Run[int]) -> None:
        """Remembers the move of these blocks. move: None when the copies have ended already."""
        if move is not None:
            self._blocks[move] = blocks
            self._of.update(dict.fromkeys(blocks, move))

    def of(self, blocks: Iterable[int]) -> list[Move]:
        """The moves of these blocks, each once."""
        if not self._of:
            return []
        return list(dict.fromkeys(self._of[block] for block in blocks if block in self._of))

    def wait(self) -> None:
        """Returns when all moves have ended."""
        for move in self._blocks:
            move.wait()

    def end(self) -> bool:
        """Forgets the moves that have ended. Returns whether there were any."""
        ended = [move for move in self._blocks if not move.left_s()]
        for move in ended:
            for block in self._blocks.pop(move):
                if self._of.get(block) is move:
                    del self._of[block]
        return bool(ended)
