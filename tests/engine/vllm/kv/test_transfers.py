"""Prompts on their way from vLLM's cache to another one: what arrives, and when, while a script says what vLLM does."""

import asyncio
import math
import queue
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.vllm.kv.messages import Chunk, LayerComputed, Sent, StepBegins
from kvtransfer.decode_side.events import Committed, Failed, LayerArrived, Released, TransferEvent
from kvtransfer.decode_side.receiver import Receiver
from kvtransfer.prefill_side.push import PushResult
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity
from prefill_worker.push_plan import PushPlan
from prefill_worker.shipping import Shipping, ShippingJob
from tests.engine.vllm.kv.test_engine import BLOCK, PROMPT, Scene, sequence
from tests.engine.vllm.test_engine import item, step
from tests.kvtransfer.peers import patient
from tests.kvtransfer.slab_process import cache_of_vllm

LAYOUT = SlabLayout(num_layers=2, num_blocks=10, num_kv_heads=1, block_size=BLOCK, head_dim=8, dtype="float32")
SOURCE, TARGET = [6, 2, 9], [1, 8, 3]
TIMEOUT_S = 30.0


class Pair:
    """The prompt `one` on its way."""

    def __init__(self, folder: Path, transport: Any) -> None:
        config = patient(transport=transport)
        self.scene = Scene(folder)
        self.source, self.target = cache_of_vllm(LAYOUT), cache_of_vllm(LAYOUT)
        self.events: queue.Queue[TransferEvent] = queue.Queue()
        self.results: queue.Queue[PushResult] = queue.Queue()
        decode = SlabIdentity("decode", 1, "hash", LAYOUT)
        self.receiver = Receiver(self.target, decode, config, "127.0.0.1", self.events.put)
        self.sender = Sender(self.source, SlabIdentity("prefill", 1, "hash", LAYOUT), config)
        engine: Any = self.scene.engine
        self.shipping = Shipping(engine, self.sender, lambda job, result: self.results.put(result))
        self.job = ShippingJob(sequence("one", sent=True), PushPlan(len(PROMPT), 0, BLOCK))
        self.grant = self.receiver.reserve(TARGET, 0, TIMEOUT_S)
        self.shipping.add(self.job, self.grant)

    def compute(self, layer: int, value: int, *, ends: bool = False) -> None:
        """vLLM writes the layer, and says that it has."""
        for block in SOURCE:
            fill(self.source, layer, block, value)
        self.shipping.step_done(self.scene.say(LayerComputed(layer, ends)))

    async def event(self) -> TransferEvent:
        return await asyncio.to_thread(self.events.get, timeout=TIMEOUT_S)

    async def ended(self) -> PushResult:
        """Afterwards the blocks are vLLM's again."""
        result = await asyncio.to_thread(self.results.get, timeout=TIMEOUT_S)
        assert self.scene.vllm.news() == [], "the sender may have read them until now"
        self.shipping.close(self.job)
        assert self.scene.vllm.news() == [Sent("one")]
        assert self.scene.engine.check_integrity() == []
        return result

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.scene.engine.link.close()
        self.scene.vllm.close()
        for slab in (self.source, self.target):
            slab.close()


def fill(slab: Slab, layer: int, block: int, value: int) -> None:
    at = LAYOUT.offset(layer, block)
    slab.buffer[at : at + LAYOUT.block_bytes] = bytes([value]) * LAYOUT.block_bytes


def read(slab: Slab, layer: int) -> set[int]:
    """The values of the prompt's blocks in the target."""
    starts = [LAYOUT.offset(layer, block) for block in TARGET]
    return {value for at in starts for value in bytes(slab.buffer[at : at + LAYOUT.block_bytes])}


@pytest.fixture(params=["shm", "tcp"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(tmp_path, request.param)
    yield pair
    pair.close()


async def test_a_layer_arrives_before_the_next_one_is_computed(pair: Pair) -> None:
    pair.shipping.step_done(pair.scene.say(StepBegins([Chunk("one", 0, 10, SOURCE)])))
    pair.compute(0, 7)
    assert await pair.event() == LayerArrived(pair.grant.transfer_id, 0, 3)
    assert (read(pair.target, 0), read(pair.target, 1)) == ({7}, {0})
    pair.compute(1, 8, ends=True)
    assert await pair.event() == LayerArrived(pair.grant.transfer_id, 1, 3)
    assert pair.results.empty(), "vLLM does not keep the blocks yet"
    pair.scene.core.outputs.put_nowait(step(item("one", [8], "length")))
    pair.shipping.step_done(await pair.scene.engine.next_step())
    assert isinstance(await pair.event(), Committed)
    assert (await pair.ended()).ok
    assert (read(pair.target, 0), read(pair.target, 1)) == ({7}, {8})


async def test_a_prompt_preempted_with_all_of_its_layers_computed_is_never_committed(pair: Pair) -> None:
    """The next step writes into its blocks, which may be on their way."""
    pair.shipping.step_done(pair.scene.say(StepBegins([Chunk("one", 0, 10, SOURCE)])))
    pair.compute(0, 7)
    pair.compute(1, 8, ends=True)
    pair.shipping.step_done(pair.scene.say(StepBegins([], ["one"])))
    for block in SOURCE:
        fill(pair.source, 1, block, 99)
    pair.scene.core.outputs.put_nowait(step(item("one", [8], "length")))
    pair.shipping.step_done(await pair.scene.engine.next_step())
    events = [await pair.event()]
    while not isinstance(events[-1], Failed):
        events.append(await pair.event())
    assert not any(isinstance(event, Committed) for event in events)
    result = await pair.ended()
    assert (result.ok, result.reason) == (False, "vLLM preempted the prompt before its KV was sent")
    assert isinstance(await pair.event(), Released)


async def test_a_cancel_between_two_layers_ends_the_transfer_and_later_layers_are_written_nowhere(pair: Pair) -> None:
    pair.shipping.step_done(pair.scene.say(StepBegins([Chunk("one", 0, 10, SOURCE)])))
    pair.compute(0, 7)
    assert isinstance(await pair.event(), LayerArrived)
    pair.receiver.cancel(pair.grant.transfer_id, "the client has left")
    assert not (await pair.ended()).ok
    assert isinstance(await pair.event(), Released)
    for block in TARGET:
        fill(pair.target, 1, block, 5)  # another's now
    pair.compute(1, 8, ends=True)
    assert read(pair.target, 1) == {5}
    assert pair.events.empty()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_grant_that_runs_out_between_two_layers_is_released_and_not_committed(
    transport: str, tmp_path: Path
) -> None:
    pair = Pair(tmp_path, transport)
    try:
        pair.shipping.step_done(pair.scene.say(StepBegins([Chunk("one", 0, 10, SOURCE)])))
        pair.compute(0, 7)
        events = [await pair.event()]
        pair.receiver._ledger.expire(math.inf)
        pair.receiver._wake.set()
        while not isinstance(events[-1], Released):
            events.append(await pair.event())
        assert not any(isinstance(event, Committed) for event in events)
        assert not (await pair.ended()).ok
    finally:
        pair.close()
