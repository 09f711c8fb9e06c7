"""From an engine's ZeroMQ sockets to a router's tree, with everything that goes wrong on the way."""

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from baton.events.event_source import EventSource
from baton.events.vllm_bridge import Bridge
from baton.service.nats_server import NatsServer
from baton_proto.kv_events import Stored
from engine.vllm.events.stream import VllmStream
from runtime.blocks.block_hash import block_hashes
from runtime.end_task import end_tasks
from runtime.errors import ConfigError, ProtocolError, UnavailableError
from runtime.nats.client import NatsClient
from tests.baton.events.cluster import TTL_S, Router
from tests.engine.vllm.events.test_blocks import BLOCK, prompt
from tests.engine.vllm.events.vllm_engine import Engine, Messages


class Scene:
    def __init__(self, nats: NatsClient, engine: Engine) -> None:
        self.engine = engine
        self.router = Router(nats)
        self.messages = Messages(block_size=BLOCK)
        self._nats = nats
        self._stream: VllmStream | None = None
        self._source: EventSource | None = None
        self.bridge: Bridge | None = None
        self.running: asyncio.Task[None] | None = None

    async def start(self, replay: bool, topic: str = "") -> Bridge:
        self._stream = VllmStream(
            self.engine.endpoint, self.engine.replay_endpoint if replay else None, topic, timeout_s=5
        )
        await self._stream.open()
        await self.engine.subscribed()
        self._source = EventSource(self._nats, "vllm", "m", BLOCK, TTL_S)
        await self._source.start(5)
        self.bridge = Bridge(self._nats, self._stream, self._source, BLOCK)
        self.running = asyncio.create_task(self.bridge.run())
        return self.bridge

    async def store(self, first: int, count: int = 1, lose: bool = False) -> None:
        """Blocks number `first` and up of one long prompt; block n is called n + 1000 by the engine."""
        names = [number + 1000 for number in range(first, first + count)]
        tokens = prompt(count, start=first * BLOCK)
        event = self.messages.stored(names, first + 999 if first else None, tokens)
        await self.engine.publish(self.messages.payload(event), lose)

    def found(self) -> int:
        """Blocks of the long prompt that a router finds."""
        hashes = block_hashes(np.array(prompt(64), dtype=np.uint32), BLOCK)
        return max(self.router.indexer.match(hashes).values(), default=0)

    async def until_found(self, count: int) -> None:
        await self.until(lambda: self.found() == count)

    async def until(self, condition: Callable[[], bool]) -> None:
        assert self.running is not None
        try:
            await self.router.until(lambda: condition() or (self.running is not None and self.running.done()))
        except TimeoutError:
            raise AssertionError(f"{self.found()} blocks found") from None
        if self.running.done():
            self.running.result()

    async def close(self) -> None:
        if self.running is not None:
            await end_tasks(self.running)
        if self._stream is not None:
            await self._stream.close()
        if self._source is not None:
            await self._source.close()
        await self.router.close()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine(remembered=8)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def scene(nats: NatsClient, engine: Engine) -> AsyncIterator[Scene]:
    scene = Scene(nats, engine)
    await scene.router.start()
    yield scene
    await scene.close()


async def test_a_router_finds_prompts_that_an_engine_has_cached(scene: Scene) -> None:
    await scene.start(replay=False)
    await scene.store(0, 3)
    await scene.store(3, 2)
    await scene.until_found(5)
    assert scene.router.directory.workers["vllm"].role == "events"
    removed = scene.messages.removed([1004, 1003])
    await scene.engine.publish(scene.messages.payload(removed))
    await scene.until_found(3)
    await scene.engine.publish(scene.messages.payload(scene.messages.cleared()))
    await scene.until_found(0)
    assert scene.router.indexer.refused_events == 0


async def test_what_the_engine_remembers_is_asked_for_at_the_start(scene: Scene) -> None:
    await scene.store(0, 3)
    await scene.start(replay=True)
    await scene.store(3)
    await scene.until_found(4)
    assert scene.engine.replays == 1


async def test_a_replay_without_topics_as_older_engines_answer_is_read(nats: NatsClient) -> None:
    engine = Engine(replays_topic=False)
    await engine.start()
    scene = Scene(nats, engine)
    await scene.router.start()
    try:
        await scene.store(0, 3)
        await scene.start(replay=True)
        await scene.until_found(3)
    finally:
        await scene.close()
        await engine.close()


async def test_that_no_message_can_be_read_is_said_at_once_with_the_first_reason(scene: Scene) -> None:
    with capture_logs() as logs:
        bridge = await scene.start(replay=False)
        for _ in range(3):
            await scene.engine.publish(msgspec.msgpack.encode([1.0, [{"type": "BlockTaught"}], 0]))
        await scene.until(lambda: bridge.cache.num_malformed == 3)
    (said,) = [line for line in logs if line["log_level"] == "error"]
    assert "no message of this engine can be read" in said["event"]
    assert "BlockTaught" in said["first_reason"]


async def test_messages_that_were_lost_are_asked_for(scene: Scene) -> None:
    bridge = await scene.start(replay=True)
    await scene.store(0, 2)
    await scene.until_found(2)
    await scene.store(2, lose=True)
    await scene.store(3, lose=True)
    await scene.store(4)
    await scene.store(5)
    await scene.until_found(6)
    assert scene.engine.replays == 2
    assert bridge.cache.num_losses == 0


@pytest.mark.parametrize("replay", [False, True])
async def test_lost_messages_that_nobody_remembers_withdraw_everything(scene: Scene, replay: bool) -> None:
    """Rather too little than something wrong; the engine's next prompt is known again."""
    bridge = await scene.start(replay)
    await scene.store(0, 2)
    await scene.until_found(2)
    for number in range(2, 12):
        await scene.store(number, lose=True)
    await scene.engine.publish(scene.messages.payload())
    await scene.until_found(0)
    assert bridge.cache.num_losses == 1
    await scene.store(0, 4)
    await scene.until_found(4)


async def test_an_engine_that_starts_again_begins_from_nothing(scene: Scene) -> None:
    await scene.start(replay=False)
    await scene.store(0, 5)
    await scene.until_found(5)
    await scene.engine.stop()
    await scene.until_found(0)
    await scene.engine.start()
    await scene.engine.subscribed()
    await scene.store(0, 2)
    await scene.until_found(2)


async def test_an_engine_that_starts_again_is_asked_for_what_was_missed(scene: Scene) -> None:
    await scene.start(replay=True)
    await scene.store(0, 5)
    await scene.until_found(5)
    await scene.engine.stop()
    await scene.engine.start()
    await scene.store(0, 3, lose=True)
    await scene.engine.subscribed()
    await scene.until_found(3)
    await scene.store(3)
    await scene.until_found(4)


async def test_numbers_that_begin_again_without_a_lost_connection_are_noticed(scene: Scene) -> None:
    """Behind a ZeroMQ proxy the connection stays when the engine goes."""
    bridge = await scene.start(replay=False)
    for number in range(3):
        await scene.store(number)
    await scene.until_found(3)
    stored = scene.messages.stored([1], None, prompt(1))
    await scene.engine.send_raw([b"", (0).to_bytes(8, "big"), scene.messages.payload(stored)])
    await scene.until_found(1)
    assert bridge.cache.num_losses == 1


async def test_a_malformed_message_withdraws_what_may_be_wrong_now(scene: Scene) -> None:
    bridge = await scene.start(replay=False)
    await scene.store(0, 3)
    await scene.until_found(3)
    await scene.engine.send_raw([b"only two", b"frames"])
    await scene.engine.publish(b"\xc1nonsense")
    await scene.until_found(0)
    assert (bridge.cache.num_malformed, bridge.cache.num_losses) == (1, 1)
    await scene.store(0, 1)
    await scene.until_found(1)


async def test_only_the_topic_that_was_asked_for_is_heard(nats: NatsClient) -> None:
    engine = Engine(topic="kv@host")
    await engine.start()
    scene = Scene(nats, engine)
    await scene.router.start()
    try:
        await scene.start(replay=False, topic="kv@")
        await engine.send_raw([b"other", (0).to_bytes(8, "big"), b"\xc1"])
        await scene.store(0, 2)
        await scene.until_found(2)
        assert scene.bridge is not None
        assert scene.bridge.cache.num_malformed == 0
    finally:
        await scene.close()
        await engine.close()


async def test_a_nats_that_lost_its_storage_gets_everything_again(scene: Scene, nats_server: NatsServer) -> None:
    await scene.start(replay=False)
    await scene.store(0, 4)
    await scene.until_found(4)
    await nats_server.restart(lose_storage=True)
    late = Router(scene.router.indexer._nats)
    await late.start()
    try:
        await late.until(lambda: any(late.table.values()) and "vllm" in late.directory.workers, timeout_s=60)
        held = b"".join(run.block_hashes for run in late.table["vllm"])
        assert len(held) == 4 * 8
    finally:
        await late.close()


async def test_a_router_that_starts_late_learns_the_blocks_from_the_stream(scene: Scene, nats: NatsClient) -> None:
    bridge = await scene.start(replay=False)
    await scene.store(0, 4)
    await scene.until_found(4)
    bridge.keyframe()
    await scene.store(4)
    await scene.until_found(5)
    late = Router(nats)
    await late.start()
    try:
        await late.until(lambda: late.indexer.settled and bool(late.table.get("vllm")))
        assert late.table == scene.router.table
        assert isinstance(next(iter(late.table["vllm"])), Stored)
    finally:
        await late.close()


async def test_an_engine_with_other_blocks_ends_the_bridge(scene: Scene) -> None:
    await scene.start(replay=False)
    event = scene.messages.stored([1], None, list(range(32)), block_size=32)
    await scene.engine.publish(scene.messages.payload(event))
    assert scene.running is not None
    with pytest.raises(ConfigError, match="start vLLM with --block-size 4"):
        await asyncio.wait_for(scene.running, 30)


async def test_two_ranks_in_one_stream_end_the_bridge(scene: Scene) -> None:
    await scene.start(replay=False)
    for rank in (0, 1):
        await scene.engine.publish(Messages(rank=rank).payload())
    assert scene.running is not None
    with pytest.raises(ProtocolError, match="ranks 0 and 1"):
        await asyncio.wait_for(scene.running, 30)


async def test_an_engine_that_is_not_there_is_told_in_time() -> None:
    stream = VllmStream("tcp://127.0.0.1:1", None, "", timeout_s=0.2)
    with pytest.raises(UnavailableError, match=r"no vLLM at tcp://127.0.0.1:1 within 0.2 s"):
        await asyncio.wait_for(stream.open(), 30)
    await stream.close()


async def test_a_replay_endpoint_that_does_not_answer_is_told_in_time(engine: Engine) -> None:
    stream = VllmStream(engine.endpoint, "tcp://127.0.0.1:1", "", timeout_s=0.3)
    await stream.open()
    with pytest.raises(UnavailableError, match="replay endpoint"):
        await asyncio.wait_for(anext(aiter(stream.messages())), 30)
    await stream.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://", "http://host:1"])
async def test_an_impossible_endpoint_is_refused(endpoint: str) -> None:
    stream = VllmStream(endpoint, None, "", timeout_s=1)
    with pytest.raises(ConfigError, match="--vllm"):
        await stream.open()
    await stream.close()
