"""The host tiers of two ranks, on CPUs and on devices that are slow to take copies and make them in any order: what
copies, steps and peers leave is the same on both, however far the second rank lags behind."""

import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine.ranks.rank_commands import ComeAfter, TierCommand
from engine.ranks.ranked_tier import RankedMove, RankedTier, RankTier
from engine.ranks.ranks import Ranks
from engine.sequences.moves import BEFORE_STEP, Move
from engine.tiers.host_kv import HostTier, tier_of
from engine.tiers.slot_layout import bytes_of_slots
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from runtime.errors import UnavailableError
from tests.engine.tiers.fake_gpu import FakeGpu

LAYOUT = SlabLayout(3, 48, 1, 2, 4, "float32")
NUM_SLOTS = 60


class Rank:
    """The slab of one rank, its device, and its steps, each of which writes a value into some blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, earlier: FakeGpu | None = None) -> None:
        self.gpu = FakeGpu(monkeypatch, 0)
        if earlier is not None:  # one clock for the streams of both
            self.gpu.streams, self.gpu._works = earlier.streams, earlier._works
            earlier.streams.append(self.gpu.current)
            self.gpu.current.cuda_stream = len(earlier.streams) - 1
        self.slab = Slab(LAYOUT, self.gpu)
        self.slab.tensor.zero_()  # torch sees it as this host's memory, and then nobody does
        self.memory = self.slab.tensor.view(LAYOUT.num_layers, LAYOUT.num_blocks, -1)
        self.is_gpu = kind == "gpu"
        self.gpu.kind = "cuda" if self.is_gpu else "host"

    def step(self, moves: list[Move], blocks: list[int], value: float) -> None:
        for layer in range(LAYOUT.num_layers):
            for move in moves:
                move.before(layer)
            fill = partial(self._fill, layer, blocks, value)
            if self.is_gpu:
                self.gpu.current.work.append(fill)
            else:
                fill()

    def _fill(self, layer: int, blocks: list[int], value: float) -> bool:
        self.memory[layer, blocks] = value
        return True

    def finish_steps(self) -> None:
        self.gpu.work_until(lambda: not self.gpu.current.work)

    def take_permits(self) -> None:
        while self.gpu.permits.acquire(blocking=False):
            pass

    def held(self, tier: HostTier) -> tuple[list[set[float]], list[set[float]]]:
        """The values in each block and each slot."""
        slots = [set(np.frombuffer(tier.content(slot), np.float32).tolist()) for slot in range(tier.num_slots)]
        return [set(self.memory[:, block].flatten().tolist()) for block in range(LAYOUT.num_blocks)], slots


class OtherRank:
    """Stands for `Ranks` of one more rank, which carries out commands and steps when the test lets it."""

    size = 2

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.problems = queue.SimpleQueue[str]()
        self.tier = RankTier(rank.slab, self._moved)
        self._listener: Callable[[int], None] = lambda move: None
        self._waiting: deque[TierCommand | Callable[[], None]] = deque()
        self._num_told = self._num_done = 0

    def listen_to_moves(self, on_moved: Callable[[int], None]) -> None:
        self._listener = on_moved

    def tell(self, command: TierCommand | Callable[[], None]) -> int:
        self._waiting.append(command)
        self._num_told += 1
        return self._num_told

    def step(self, blocks: list[int], value: float) -> None:
        self.tell(lambda: self.rank.step(self.tier.take_moves(), blocks, value))

    def num_until_last_step(self) -> int:
        return max((number for number, command in enumerate(self._waiting, 1) if callable(command)), default=0)

    def go_on(self, count: int) -> None:
        for command in [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]:
            if callable(command):
                command()
            else:
                if isinstance(command, ComeAfter):
                    self.rank.gpu.permits.release(10_000)
                self.tier.obey(command)
            self._num_done += 1

    def wait_done(self, sequence: int, timeout_s: float) -> None:
        self.rank.gpu.permits.release(10_000)
        self.go_on(sequence - self._num_done)

    def _moved(self, move: int, problem: str) -> None:
        if problem:
            self.problems.put(problem)
        else:
            self._listener(move)


Pair = tuple[Rank, OtherRank, HostTier, RankedTier]


@pytest.fixture(params=["cpu", "gpu"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Rank 0, the other one, and the tiers of rank 0 and of both."""
    monkeypatch.setattr("engine.tiers.gpu_kv._GROUP_BYTES", LAYOUT.block_bytes)  # an event for every layer
    monkeypatch.setattr("engine.tiers.gpu_kv._CALL_COPIES", 2)
    first = Rank(monkeypatch, request.param)
    second = Rank(monkeypatch, request.param, first.gpu)
    ranks = [first, second]
    own = tier_of(first.slab, bytes_of_slots(LAYOUT, NUM_SLOTS))
    other = OtherRank(second)
    tier = RankedTier(own, cast(Ranks, other))
    assert (tier.num_slots, tier.spare) == (NUM_SLOTS, own.spare)
    yield first, other, own, tier
    for rank in ranks:
        rank.gpu.permits.release(10_000)
    other.tier.host.close()
    tier.close()


def on_stream_of(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: rank.gpu.current)


@pytest.mark.parametrize("seed", range(6))
def test_both_ranks_end_with_what_one_would_hold_without_a_lag(
    pair: Pair, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other, own, tier = pair
    dice, blocks, slots = random.Random(seed), [0.0] * LAYOUT.num_blocks, [0.0] * NUM_SLOTS
    move_of: dict[int, RankedMove] = {}
    num_peers_kept_out = 0

    def catch_up(count: int) -> None:
        on_stream_of(other.rank, monkeypatch)
        other.go_on(count)
        on_stream_of(first, monkeypatch)

    def finish_steps() -> None:
        """Because every rank takes part in a step, one that has ended on rank 0 has ended."""
        catch_up(other.num_until_last_step())
        first.finish_steps()
        other.rank.finish_steps()

    def copy(some: list[int], others: list[int], upwards: bool) -> None:
        finish_steps()
        other.rank.take_permits()
        first.gpu.permits.release(1000)
        move_of.update(dict.fromkeys(some, tier.load(others, some) if upwards else tier.store(some, others)))
        for block, slot in zip(some, others, strict=True):
            if upwards:
                blocks[block] = slots[slot]
            else:
                slots[slot] = blocks[block]

    def step(some: list[int], value: float) -> None:
        moves = list(dict.fromkeys(move_of[block] for block in some if block in move_of))
        for move in moves:
            move.before(BEFORE_STEP)
        other.step(some, value)
        first.step(cast(Any, moves), some, value)

    def write_as_peer(some: list[int], value: float) -> list[int]:
        """The blocks whose copies have ended. No step on its way writes them."""
        finish_steps()
        other.rank.gpu.permits.release(dice.choice((1, 10_000)))
        ended = [block for block in some if block not in move_of or not move_of[block].left_s()]
        for rank in (first, other.rank):
            rank.memory[:, ended] = value
        return ended

    on_stream_of(first, monkeypatch)
    copy(list(range(NUM_SLOTS - 30)), list(range(30, NUM_SLOTS)), upwards=False)  # no slot holds what nobody wrote
    copy(list(range(30)), list(range(30)), upwards=False)
    for number in range(1, 200):
        some = dice.sample(range(LAYOUT.num_blocks), dice.choice((1, 1, 4, 30)))
        others = dice.sample(range(NUM_SLOTS), len(some))
        value = float(number)
        match dice.randrange(4):
            case 0 | 1 as upwards:
                copy(some, others, bool(upwards))
                continue  # before the other rank knows of it
            case 2:
                step(some, value)
            case _:
                ended = write_as_peer(some, value)
                num_peers_kept_out += len(some) - len(ended)
                some = ended
        for block in some:
            blocks[block] = value
        catch_up(dice.choice((0, 1, 2)))

    assert num_peers_kept_out > 5
    catch_up(1000)
    for move in set(move_of.values()):
        move.wait()
    for rank, held in ((first, own), (other.rank, other.tier.host)):
        rank.finish_steps()
        assert rank.held(held) == ([{value} for value in blocks], [{value} for value in slots])
    assert other.problems.empty()


def test_a_peer_is_let_in_and_whoever_waits_is_woken_when_the_last_rank_has_copied(pair: Pair) -> None:
    first, other, own, tier = pair
    first.slab.tensor.fill_(7.0)
    other.rank.slab.tensor.fill_(7.0)
    move, woken = tier.store([1], [0]), threading.Event()
    move.then(woken.set)
    if move.own is not None:
        move.own.wait()
    assert move.left_s() > 0
    other.go_on(1)
    move.wait()
    assert woken.wait(30)
    assert first.held(own)[1][0] == other.rank.held(other.tier.host)[1][0] == {7.0}


@pytest.mark.parametrize("pair", ["gpu"], indirect=True)
def test_copies_that_the_other_rank_cannot_make_are_its_loss(pair: Pair) -> None:
    """On a CPU they fail in the command, which ends the rank."""
    _, other, _, tier = pair
    other.rank.gpu.problem = UnavailableError("CUDA: out of memory")
    move = tier.store([0], [5])
    other.go_on(1)
    problem = other.problems.get(timeout=30)
    assert "cannot copy KV" in problem
    assert "out of memory" in problem
    assert move.left_s() > 0
    other.rank.gpu.problem = None
