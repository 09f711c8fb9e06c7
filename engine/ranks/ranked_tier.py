"""The host tiers of a tensor-parallel worker: each rank has one for its own slab, all under one block table.

Copies on another rank are ordered against everything else that touches their blocks as on rank 0, because:

- Before them: rank 0 asks for a copy when no step on its way uses the blocks. A step has ended on rank 0 only when
  every rank has given its part of the step's last sum, and in the order of its stream a rank gives that part after all
  its reads and writes of KV. So no rank has a step on its way that uses the blocks.
- Among each other: a rank carries out stores and loads in rank 0's order, and its tier orders them as rank 0's does.
- After them, a step: rank 0 tells ComeAfter before it tells the step, for every move that its own step comes after. The
  other rank's step then waits for the same copies of its own, layer by layer, on the stream that computes. It never
  waits for other copies, which may go on for long.
- After them, a peer that writes a block: rank 0 lets it in when the move has ended, which it has when every rank has
  said so. Likewise for memory that is given up, see FinishKv.

On CPUs a rank makes a copy while it carries out the command, and a step is a later command.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from engine.ranks.rank_commands import ComeAfter, FinishKv, LoadKv, OpenTier, StoreKv, TierCommand
from engine.ranks.ranks import HANG_LIMIT_S, Ranks
from engine.sequences.moves import BEFORE_STEP, Move
from engine.tiers.host_kv import HostTier, tier_of
from engine.tiers.slot_layout import bytes_of_slots
from kvtransfer.slab.slab import Slab

REPORT_S = 1e-4  # about how long the report of another rank takes


class RankedMove:
    """Implements `engine.sequences.moves.Move` on rank 0. It has ended when the copies have on every rank. Methods
    raise RankLostError, too."""

    def __init__(self, number: int, ranks: Ranks) -> None:
        self.number = number
        self.own: Move | None = None  # rank 0's copies; None: they are made
        self._ranks = ranks
        self._num_others = ranks.size - 1  # ranks that have not reported
        self._wake: Callable[[], object] = lambda: None

    def is_enqueued(self) -> bool:
        """Always on another rank: its step waits until its copies are enqueued."""
        return self.own is None or self.own.is_enqueued()

    def left_s(self) -> float:
        own_s = 0.0 if self.own is None else self.own.left_s()
        return max(own_s, REPORT_S) if self._num_others else own_s

    def before(self, layer: int) -> None:
        if layer == BEFORE_STEP:
            self._ranks.tell(ComeAfter(self.number))
        if self.own is not None:
            self.own.before(layer)

    def then(self, wake: Callable[[], object]) -> None:
        self._wake = wake  # first: a report that comes now wakes
        if self.own is not None:
            self.own.then(wake)
        elif not self._num_others:
            wake()

    def wait(self) -> None:
        if self.own is not None:
            self.own.wait()
        self._ranks.wait_done(self._ranks.tell(FinishKv()), HANG_LIMIT_S)

    def ended_elsewhere(self) -> bool:
        """Takes one rank's report, on the thread that reads them. Returns whether it was the last."""
        self._num_others -= 1
        if not self._num_others:
            self._wake()
        return not self._num_others


class RankedTier:
    """Implements `engine.blocks.lower_tier.LowerTier` on rank 0. Methods raise RankLostError."""

    def __init__(self, own: HostTier, ranks: Ranks) -> None:
        self.num_slots, self.num_window_slots, self.spare = own.num_slots, own.num_window_slots, own.spare
        self._own = own
        self._ranks = ranks
        self._numbers = itertools.count()
        self._moves: dict[int, RankedMove] = {}  # that some rank has not reported
        ranks.listen_to_moves(self._ended)
        ranks.wait_done(ranks.tell(OpenTier(own.num_slots)), HANG_LIMIT_S)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> RankedMove:
        move = self._begun()
        self._ranks.tell(StoreKv(move.number, list(blocks), list(slots)))
        move.own = self._own.store(blocks, slots)
        return move

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> RankedMove:
        move = self._begun()
        self._ranks.tell(LoadKv(move.number, list(slots), list(blocks)))
        move.own = self._own.load(slots, blocks)
        return move

    @property
    def block_s(self) -> float:
        return self._own.block_s

    def load_s(self, num_blocks: int) -> float:
        return self._own.load_s(num_blocks)

    def close(self) -> None:
        self._own.close()

    def _begun(self) -> RankedMove:
        move = RankedMove(next(self._numbers), self._ranks)
        self._moves[move.number] = move
        return move

    def _ended(self, number: int) -> None:
        if self._moves[number].ended_elsewhere():
            del self._moves[number]


class RankTier:
    """What another rank does at rank 0's command."""

    def __init__(self, slab: Slab, on_moved: Callable[[int, str], None]) -> None:
        """on_moved(move, problem): called once per store or load, when it has ended, by any thread. problem: why the
        copies cannot be made; empty: they are."""
        self._slab = slab
        self._on_moved = on_moved
        self._tier: HostTier | None = None
        self._moves: dict[int, Move] = {}  # under way
        self._awaited: list[Move] = []

    @property
    def host(self) -> HostTier:
        """The rank's own."""
        assert self._tier is not None, "rank 0 opens the tier first"
        return self._tier

    def obey(self, command: TierCommand) -> None:
        match command:
            case OpenTier(num_slots):
                self._tier = tier_of(self._slab, bytes_of_slots(self._slab.layout, num_slots))
            case StoreKv(number, blocks, slots):
                self._take(number, self.host.store(blocks, slots))
            case LoadKv(number, slots, blocks):
                self._take(number, self.host.load(slots, blocks))
            case ComeAfter(number):
                if (move := self._moves.get(number)) is not None:
                    move.before(BEFORE_STEP)
                    self._awaited.append(move)
            case FinishKv():
                for move in self._moves.values():
                    move.wait()

    def take_moves(self) -> list[Move]:
        """The moves that the step beginning now comes after."""
        awaited, self._awaited = self._awaited, []
        return awaited

    def _take(self, number: int, move: Move | None) -> None:
        self._moves = {earlier: one for earlier, one in self._moves.items() if one.left_s()}
        if move is None:
            self._on_moved(number, "")
        else:
            self._moves[number] = move
            move.then(partial(self._report, number, move))

    def _report(self, number: int, move: Move) -> None:
        """Reports the end of a move, on a thread of the tier."""
        problem = ""
        try:
            move.wait()
        except Exception as error:
            problem = f"cannot copy KV: {error!r}"
        self._on_moved(number, problem)
