"""Engine, sender and receiver in one process, with a runner that writes known values: what arrives, and when."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from baton_proto.decoding import decoder
from baton_proto.sampling import SamplingParams
from baton_proto.worker import FirstToken, Grant
from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.sequences.batch import Batch, LayerDone, SampledToken, StepDone
from engine.sequences.sequence import Sequence, SequenceStatus
from kvtransfer.decode_side.events import Committed, Failed, LayerArrived, Released, TransferEvent
from kvtransfer.decode_side.receiver import Receiver
from kvtransfer.prefill_side.push import Push, PushResult
from kvtransfer.prefill_side.sender import Sender
from kvtransfer.slab.layout import SlabLayout
from kvtransfer.slab.slab import Slab
from kvtransfer.wire.identity import SlabIdentity
from prefill_worker.push_plan import PushPlan
from prefill_worker.shipping import Shipping, ShippingJob
from tests.kvtransfer.peers import patient

LAYOUT = SlabLayout(num_layers=4, num_blocks=64, num_kv_heads=2, block_size=16, head_dim=8, dtype="float32")
TIMEOUT_S = 30.0


def kv_value(layer: int, token_id: int, position: int) -> float:
    return layer * 1e6 + token_id * 1e3 + position


class WritingRunner:
    """`before_layer` is called before each layer is written."""

    num_layers = LAYOUT.num_layers
    depth = 0

    def __init__(self, slab: torch.Tensor) -> None:
        self._slab = slab
        self.before_layer: Callable[[Batch, int], None] = lambda batch, layer: None

    def submit(self, batch: Batch, layer_done: LayerDone | None) -> StepDone:
        for layer in range(self.num_layers):
            self.before_layer(batch, layer)
            for item in batch.items:
                for position in range(item.start, item.end):
                    block = item.sequence.block_table[position // LAYOUT.block_size]
                    value = kv_value(layer, item.sequence.token_ids[position], position)
                    self._slab[layer, block, :, :, position % LAYOUT.block_size] = value
            assert layer_done is not None
            layer_done(layer)
        return StepDone([SampledToken(42, None) for item in batch.items if item.sample])


class Pair:
    """A prefill side with an engine thread, and the slab of a decode side."""

    def __init__(self, transport: Any) -> None:
        config = patient(transport=transport, checksum=True)
        self.source, self.target = Slab(LAYOUT), Slab(LAYOUT)
        self.source.tensor.fill_(float("nan"))  # what was never computed must not travel
        self.events: queue.Queue[TransferEvent] = queue.Queue()
        self.layers: queue.Queue[LayerArrived] = queue.Queue()
        self.results: queue.Queue[PushResult] = queue.Queue()
        self.receiver = Receiver(
            self.target, SlabIdentity("decode", 1, "hash", LAYOUT), config, "127.0.0.1", self._event
        )
        self.runner = WritingRunner(self.source.tensor)
        self.engine = Engine(
            self.runner,
            BlockManager(LAYOUT.num_blocks, LAYOUT.block_size),
            max_batch_tokens=40,
            max_running=8,
            eos_token_ids=frozenset(),
        )
        self.sender = Sender(self.source, SlabIdentity("prefill", 1, "hash", LAYOUT), config)
        self.shipping = Shipping(self.engine, self.sender, self._done)
        self.loop = EngineLoop(self.engine, self.shipping.step_done)
        self.loop.start()

    def ship(self, tokens: list[int], target_blocks: list[int], skip_tokens: int = 0) -> ShippingJob:
        sequence = Sequence(
            f"r{id(tokens)}", list(tokens), len(tokens), SamplingParams(max_tokens=5), prefill_only=True, pinned=True
        )
        job = ShippingJob(sequence, PushPlan(len(tokens), skip_tokens, LAYOUT.block_size))
        self.grant = self.receiver.reserve(target_blocks, skip_tokens, TIMEOUT_S)
        self.loop.call(lambda _: self.shipping.add(job, self.grant)).result(TIMEOUT_S)
        return job

    def event(self) -> TransferEvent:
        return self.events.get(timeout=TIMEOUT_S)

    def until_released(self) -> None:
        """The decode worker was told that the prompt failed. (A push that was aborted early was never announced to its
        receiver, so this is what ends the lease.)"""
        self.receiver.cancel(self.grant.transfer_id, "the prompt failed")
        while not isinstance(event := self.event(), Released):
            assert isinstance(event, Failed)

    def problems(self) -> list[str]:
        def look(engine: Engine) -> list[str]:
            used = engine.block_manager.num_used
            return engine.check_integrity() + ([f"{used} blocks are still used"] if used else [])

        return self.loop.call(look).result(TIMEOUT_S) + self.receiver.check_integrity()

    def close(self) -> None:
        self.sender.close()
        self.loop.stop(TIMEOUT_S)
        self.receiver.close()
        self.source.close()
        self.target.close()

    def _event(self, event: TransferEvent) -> None:
        (self.layers if isinstance(event, LayerArrived) else self.events).put(event)  # type: ignore[arg-type]

    def _done(self, job: ShippingJob, result: PushResult) -> None:
        self.loop.call(lambda _: self.shipping.close(job)).add_done_callback(lambda _: self.results.put(result))


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


def expected(tokens: list[int], skip_tokens: int) -> torch.Tensor:
    """`[layers, granted blocks * block_size]` of the values, zero behind the last token."""
    num_blocks = -(-len(tokens) // LAYOUT.block_size)
    values = torch.zeros(LAYOUT.num_layers, num_blocks * LAYOUT.block_size)
    for layer in range(LAYOUT.num_layers):
        for position, token_id in enumerate(tokens):
            values[layer, position] = kv_value(layer, token_id, position)
    return values[:, skip_tokens:]


def arrived(pair: Pair, blocks: list[int]) -> torch.Tensor:
    kv = pair.target.tensor[:, blocks]  # [layers, blocks, heads, 2, block_size, head_dim]
    assert (kv == kv[:, :, :1, :1, :, :1]).all()
    return kv[:, :, 0, 0, :, 0].flatten(1)


@pytest.mark.parametrize("length", [1, 16, 17, 40, 41, 100, 128])
def test_the_decode_side_gets_every_token_of_every_layer(pair: Pair, length: int) -> None:
    tokens = [(7 * position) % 500 for position in range(length)]
    blocks = list(range(50, 50 - -(-length // 16), -1))
    pair.ship(tokens, blocks)
    committed = pair.event()
    assert isinstance(committed, Committed), committed
    first: FirstToken = decoder(FirstToken)(committed.payload)
    assert (first.token_id, first.prompt_counts.cached_tokens) == (42, 0)
    assert committed.kv_blocks == len(blocks)
    assert torch.equal(arrived(pair, blocks), expected(tokens, 0))
    assert pair.results.get(timeout=TIMEOUT_S).ok
    assert pair.problems() == []


@pytest.mark.parametrize("name", ["kv-send", "kv-answers"])
def test_a_prompt_for_whose_link_no_thread_can_be_started_ends_and_leaves_no_block(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_others(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_others)
        pair.ship([1] * 40, [1, 2, 3])
        result = pair.results.get(timeout=TIMEOUT_S)
        assert not result.ok
        assert "can't start new thread" in result.reason
    pair.until_released()
    assert pair.problems() == []
    pair.ship([1] * 40, [1, 2, 3])
    assert pair.results.get(timeout=TIMEOUT_S).ok


def test_a_cached_prefix_here_is_shipped_and_one_over_there_is_not(pair: Pair) -> None:
    shared = [position % 500 for position in range(64)]
    first, second, third = shared + [1] * 30, shared + [2] * 30, shared + [3] * 30
    pair.ship(first, list(range(6)))
    assert isinstance(pair.event(), Committed)
    assert pair.results.get(timeout=TIMEOUT_S).ok
    for tokens, skip_tokens, blocks in ((second, 0, list(range(10, 16))), (third, 32, list(range(20, 24)))):
        job = pair.ship(tokens, blocks, skip_tokens)
        committed = pair.event()
        assert isinstance(committed, Committed), committed
        assert decoder(FirstToken)(committed.payload).prompt_counts.cached_tokens == 64
        assert torch.equal(arrived(pair, blocks), expected(tokens, skip_tokens))
        assert pair.results.get(timeout=TIMEOUT_S).ok
        assert job.sequence.block_table == []
    assert pair.problems() == []


def test_layer_0_arrives_before_the_last_layer_is_computed(pair: Pair) -> None:
    arrived_before: list[LayerArrived] = []

    def wait_for_layer_0(batch: Batch, layer: int) -> None:
        if layer == LAYOUT.num_layers - 1:
            arrived_before.append(pair.layers.get(timeout=TIMEOUT_S))

    pair.runner.before_layer = wait_for_layer_0
    pair.ship([5] * 32, [0, 1])
    assert isinstance(pair.event(), Committed)
    assert [(event.layer, event.blocks) for event in arrived_before] == [(0, 2)]


def test_the_commit_leaves_after_the_last_chunk_by_the_stamps_however_long_a_new_link_takes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = pair.sender.begin

    def after_a_while(grant: Grant, on_done: Callable[[PushResult], None]) -> Push:
        threading.Event().wait(0.2)  # longer than the whole prompt takes
        return begin(grant, on_done)

    monkeypatch.setattr(pair.sender, "begin", after_a_while)
    pair.ship([5] * 100, list(range(7)))
    committed = pair.event()
    assert isinstance(committed, Committed)
    first = decoder(FirstToken)(committed.payload)
    last = first.chunks[-1]
    assert len(first.chunks) == 3
    assert first.begun_us + committed.sent_us >= last.start_us + last.took_us


def test_two_prompts_with_one_new_prefix_at_once_arrive_whole(pair: Pair) -> None:
    """The slower one's own copy leaves the cache to the faster one's while it is being shipped."""
    prompts = [[9] * 64 + [number] * 20 for number in range(4)]
    for number, tokens in enumerate(prompts):
        pair.ship(tokens, list(range(6 * number, 6 * number + 6)))
    for _ in prompts:
        assert isinstance(pair.event(), Committed)
        assert pair.results.get(timeout=TIMEOUT_S).ok
    for number, tokens in enumerate(prompts):
        assert torch.equal(arrived(pair, list(range(6 * number, 6 * number + 6))), expected(tokens, 0))
    assert pair.problems() == []


def stopped_in_the_second_chunk(pair: Pair, num_tokens: int) -> tuple[ShippingJob, threading.Event]:
    """A prompt in the middle of a layer, and what lets it go on."""
    reached, go_on = threading.Event(), threading.Event()

    def stop(batch: Batch, layer: int) -> None:
        if batch.items[0].start > 0 and layer == 2:
            reached.set()
            go_on.wait(TIMEOUT_S)

    pair.runner.before_layer = stop
    job = pair.ship([6] * num_tokens, list(range(-(-num_tokens // 16))))
    assert reached.wait(TIMEOUT_S)
    return job, go_on


def test_a_cancel_in_mid_prompt_frees_both_sides(pair: Pair) -> None:
    job, go_on = stopped_in_the_second_chunk(pair, 200)
    cancelled = pair.loop.call(lambda _: pair.shipping.cancel(job, "no longer wanted"))
    go_on.set()
    cancelled.result(TIMEOUT_S)
    assert not pair.results.get(timeout=TIMEOUT_S).ok
    assert job.sequence.status is SequenceStatus.FINISHED
    pair.until_released()
    assert pair.receiver.lease_count() == 0
    assert pair.problems() == []


def test_a_receiver_that_cancels_ends_the_prompt(pair: Pair) -> None:
    job, go_on = stopped_in_the_second_chunk(pair, 400)
    pair.receiver.cancel(pair.grant.transfer_id, "the client is gone")
    go_on.set()
    assert isinstance(pair.event(), Released)
    assert not pair.results.get(timeout=TIMEOUT_S).ok
    assert job.sequence.status is SequenceStatus.FINISHED
    assert pair.problems() == []


def test_a_failing_step_aborts_the_push_and_the_next_prompt_works(pair: Pair) -> None:
    def fail(batch: Batch, layer: int) -> None:
        raise RuntimeError("no such layer")

    pair.runner.before_layer = fail
    pair.ship([6] * 20, [0, 1])
    assert not pair.results.get(timeout=TIMEOUT_S).ok
    pair.until_released()
    pair.runner.before_layer = lambda batch, layer: None
    pair.ship([6] * 20, [0, 1])
    assert isinstance(pair.event(), Committed)
    assert pair.results.get(timeout=TIMEOUT_S).ok
    assert pair.problems() == []
