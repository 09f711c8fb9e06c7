"""The thread that enqueues a GPU tier's copies, on a device that is slow to take them and does them in any order."""

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.sequences.moves import BEFORE_STEP
from engine.tiers.gpu_kv import GpuHostKv, GpuMove
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from runtime.errors import UnavailableError
from tests.engine.tiers.fake_gpu import FakeGpu

LAYOUT = SlabLayout(3, 64, 1, 2, 4, "float32")
IN_TWO_GROUPS = replace(LAYOUT, window_layers=frozenset({0, 2}), num_window_blocks=24)
FEW_WINDOWS = replace(IN_TWO_GROUPS, window_layers=frozenset({1}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch, 0)


@pytest.fixture
def slab(gpu: FakeGpu, request: pytest.FixtureRequest) -> Iterator[Slab]:
    slab = Slab(getattr(request, "param", LAYOUT), gpu)
    slab.flat.zero_()  # torch sees it as this host's memory, and then nobody does
    gpu.kind = "cuda"
    yield slab
    slab.close()


@pytest.fixture
def open_tier(gpu: FakeGpu, slab: Slab, monkeypatch: pytest.MonkeyPatch) -> GpuHostKv:
    monkeypatch.setattr("engine.tiers.gpu_kv._GROUP_BYTES", LAYOUT.block_bytes)  # an event for every layer
    monkeypatch.setattr("engine.tiers.gpu_kv._CALL_COPIES", 2)
    return GpuHostKv(slab, 80 * slab.layout.nbytes // LAYOUT.num_blocks)


@pytest.fixture
def tier(open_tier: GpuHostKv, gpu: FakeGpu) -> Iterator[GpuHostKv]:
    yield open_tier
    gpu.permits.release(10_000)
    open_tier.close()


def take_permits(gpu: FakeGpu) -> None:
    while gpu.permits.acquire(blocking=False):
        pass


@pytest.mark.parametrize("slab", [LAYOUT, IN_TWO_GROUPS, FEW_WINDOWS], indirect=True)
def test_what_measures_the_link_stays_in_the_slab(
    gpu: FakeGpu, slab: Slab, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """There are more slots than blocks."""
    written, copy = list[int](), gpu.copy

    def noted(destinations: NDArray[np.uint64], *others: Any) -> None:
        written.extend(destinations.tolist())
        copy(destinations, *others)

    monkeypatch.setattr(gpu, "copy", noted)
    request.getfixturevalue("tier")
    first = slab.flat.data_ptr()
    assert first <= min(written)
    assert max(written) <= first + slab.layout.nbytes - slab.layout.block_bytes


@pytest.mark.parametrize("slab", [LAYOUT, IN_TWO_GROUPS], ids=["one group", "two groups"], indirect=True)
@pytest.mark.parametrize("seed", range(6))
def test_blocks_and_slots_end_with_what_they_would_hold_without_a_thread(
    gpu: FakeGpu, slab: Slab, tier: GpuHostKv, seed: int
) -> None:
    layout, memory = slab.layout, slab.layers
    dice, blocks = random.Random(seed), [0] * layout.num_ids
    slots = [0] * (tier.num_slots + tier.num_window_slots)
    assert tier.num_slots == 80
    assert tier.num_window_slots == (30 if layout.window_layers else 0)
    move_of: dict[int, GpuMove] = {}
    num_passed = 0

    def fill(layer: int, some: list[int], value: int) -> bool:
        there = layout.layer_blocks(layer)
        memory[layer][[block - there.start for block in some if block in there]] = float(value)
        return True

    def some_slots(some: list[int]) -> list[int]:
        num_places = sum(block >= layout.num_blocks for block in some)
        whole = dice.sample(range(tier.num_slots), len(some) - num_places)
        places = dice.sample(range(tier.num_slots, len(slots)), num_places)
        return [(places if block >= layout.num_blocks else whole).pop() for block in some]

    for number in range(1, 250):
        take_permits(gpu)
        some = dice.sample(range(layout.num_ids), dice.choice((1, 1, 4, 40)))
        others = some_slots(some)
        gpu.work_until(lambda: not gpu.current.work)  # no step on its way writes blocks that are copied
        match dice.randrange(3):
            case 0:
                move_of |= dict.fromkeys(some, tier.store(some, others))
                for block, slot in zip(some, others, strict=True):
                    slots[slot] = blocks[block]
            case 1:
                move_of |= dict.fromkeys(some, tier.load(others, some))
                for block, slot in zip(some, others, strict=True):
                    blocks[block] = slots[slot]
            case _:
                moves = list(dict.fromkeys(move_of[block] for block in some if block in move_of))
                gpu.permits.release(dice.choice((1, 2, 10, 10_000)))
                if not all(move.is_enqueued() for move in moves):
                    num_passed += 1
                    if dice.randrange(2):
                        continue  # others pass it
                    gpu.permits.release(10_000)  # there are no others: the step waits
                for layer in range(BEFORE_STEP, LAYOUT.num_layers):
                    for move in moves:
                        move.before(layer)
                    if layer >= 0:
                        gpu.current.work.append(partial(fill, layer, some, number))
                for block in some:
                    blocks[block] = number
        gpu.permits.release(dice.choice((1, 3, 100)))
        gpu.work(dice.choice((0, 0, 5, 100)))

    assert num_passed > 5
    gpu.permits.release(10_000)
    held = [set(np.frombuffer(tier.content(slot), np.float32).tolist()) for slot in range(len(slots))]
    for move in move_of.values():
        move.wait()
    gpu.work_until(lambda: not gpu.current.work)
    assert held == [{float(value)} for value in slots]
    for layer, cache in enumerate(memory):
        there = layout.layer_blocks(layer)
        expected = [{float(value)} for value in blocks[there.start : there.stop]]
        assert [set(cache[at].flatten().tolist()) for at in range(len(there))] == expected
    assert all(move.left_s() == 0 for move in move_of.values())


@pytest.mark.parametrize("slab", [IN_TWO_GROUPS], indirect=True)
def test_a_place_is_loaded_after_the_steps_on_their_way_which_may_read_it(
    gpu: FakeGpu, slab: Slab, tier: GpuHostKv
) -> None:
    place, there, seen = LAYOUT.num_blocks, slab.layers[0][0], []
    for number in range(20):
        there.fill_(number)
        tier.store([place], [tier.num_slots]).wait()
        there.fill_(-1)
        gpu.current.work.append(lambda: seen.append(there.unique().tolist()) is None)
        tier.load([tier.num_slots], [place]).wait()
        gpu.work_until(lambda: not gpu.current.work)
        assert there.unique().tolist() == [number]
    assert seen == [[-1]] * 20


def test_a_call_returns_before_the_driver_has_taken_the_copies(gpu: FakeGpu, tier: GpuHostKv) -> None:
    take_permits(gpu)
    down, up = tier.store([0, 1, 2, 3], [5, 6, 7, 8]), tier.load([5], [9])
    assert not down.is_enqueued()
    assert not up.is_enqueued()
    assert down.left_s() > 0
    gpu.permits.release(10_000)
    up.before(BEFORE_STEP)
    assert down.is_enqueued(), "copies are enqueued in the order of the calls"
    assert down.left_s() > 0, "they are not made yet"
    up.wait()
    down.wait()
    assert (down.left_s(), up.left_s()) == (0, 0)


def test_what_the_driver_refuses_is_never_taken_for_copied(gpu: FakeGpu, tier: GpuHostKv) -> None:
    take_permits(gpu)
    lost, later = tier.store([0], [5]), tier.store([1], [6])
    woken = threading.Event()
    lost.then(woken.set)
    gpu.problem = UnavailableError("CUDA: out of memory")
    gpu.permits.release(1)
    with pytest.raises(UnavailableError, match="out of memory"):
        lost.wait()
    assert woken.wait(30)
    gpu.problem = None
    gpu.permits.release(10_000)
    later.wait()
    for asks in (lost.left_s, lost.is_enqueued, lambda: lost.before(BEFORE_STEP), lambda: tier.content(5)):
        with pytest.raises(UnavailableError, match="out of memory"):
            asks()


def test_closing_does_what_was_asked_for_and_ends_the_threads(gpu: FakeGpu, open_tier: GpuHostKv) -> None:
    take_permits(gpu)
    before, woken = gpu.num_calls, threading.Event()
    open_tier.store(range(8), range(8))
    open_tier.store([9], [9]).then(woken.set)
    gpu.permits.release(10_000)
    open_tier.close()
    assert woken.is_set()
    assert gpu.num_calls == before + LAYOUT.num_layers * (4 + 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("kv copies", "kv moves"))]
