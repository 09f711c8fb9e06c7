"""From an engine's ZeroMQ sockets to a router's tree, with everything that goes wrong on the way."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.vllm.events.blocks import MISFIT
from engine.vllm.events.stream import VllmStream
from runtime.errors import ConfigError, ProtocolError, UnavailableError
from tests.engine.vllm.events.follower import Follower
from tests.engine.vllm.events.test_blocks import BLOCK, prompt
from tests.engine.vllm.events.vllm_engine import Engine, Messages


class Scene(Follower):
    """An engine, and what follows it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.endpoint, engine.replay_endpoint, BLOCK)
        self.engine = engine
        self.messages = Messages(block_size=BLOCK)

    async def listen(self) -> None:
        await self.stream.open()
        await self.engine.subscribed()
        self.start()

    async def store(self, first: int, count: int = 1, lose: bool = False) -> None:
        """Blocks number `first` and up of one long prompt; block n is called n + 1000 by the engine."""
        names = [number + 1000 for number in range(first, first + count)]
        tokens = prompt(count, start=first * BLOCK)
        event = self.messages.stored(names, first + 999 if first else None, tokens)
        await self.engine.publish(self.messages.payload(event), lose)

    async def until_found(self, count: int) -> None:
        """`count` leading blocks of the long prompt are found."""
        await self.until(lambda: self.found(prompt(64)) == count)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine(remembered=8)
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
async def scene(engine: Engine) -> AsyncIterator[Scene]:
    scene = Scene(engine)
    yield scene
    await scene.close()


async def test_a_router_finds_prompts_that_an_engine_has_cached(scene: Scene) -> None:
    await scene.listen()
    await scene.store(0, 3)
    await scene.store(3, 2)
    await scene.until_found(5)
    removed = scene.messages.removed([1004, 1003])
    await scene.engine.publish(scene.messages.payload(removed))
    await scene.until_found(3)
    await scene.engine.publish(scene.messages.payload(scene.messages.cleared()))
    await scene.until_found(0)


@pytest.mark.parametrize("replays_topic", [True, False], ids=["", "without topics, as older engines answer"])
async def test_what_the_engine_remembers_is_asked_for_at_the_start(replays_topic: bool) -> None:
    engine = Engine(replays_topic=replays_topic)
    await engine.start()
    scene = Scene(engine)
    try:
        await scene.store(0, 3)
        await scene.listen()
        await scene.store(3)
        await scene.until_found(4)
        assert engine.replays == 1
    finally:
        await scene.close()
        await engine.close()


async def test_that_no_message_can_be_read_is_said_at_once_with_the_first_reason(scene: Scene) -> None:
    with capture_logs() as logs:
        await scene.listen()
        for _ in range(3):
            await scene.engine.publish(msgspec.msgpack.encode([1.0, [{"type": "BlockTaught"}], 0]))
        await scene.until(lambda: scene.cache.num_malformed == 3)
    (said,) = [line for line in logs if line["log_level"] == "error"]
    assert "no message of this engine can be read" in said["event"]
    assert "BlockTaught" in said["first_reason"]


async def test_messages_that_were_lost_are_asked_for(scene: Scene) -> None:
    await scene.listen()
    await scene.store(0, 2)
    await scene.until_found(2)
    await scene.store(2, lose=True)
    await scene.store(3, lose=True)
    await scene.store(4)
    await scene.store(5)
    await scene.until_found(6)
    assert scene.engine.replays == 2
    assert scene.cache.num_losses == 0


async def test_lost_messages_that_nobody_remembers_withdraw_everything(scene: Scene) -> None:
    """Rather too little than something wrong; the engine's next prompt is known again."""
    await scene.listen()
    await scene.store(0, 2)
    await scene.until_found(2)
    for number in range(2, 12):
        await scene.store(number, lose=True)
    await scene.engine.publish(scene.messages.payload())
    await scene.until_found(0)
    assert scene.cache.num_losses == 1
    await scene.store(0, 4)
    await scene.until_found(4)


async def test_an_engine_that_starts_again_begins_from_nothing(scene: Scene) -> None:
    await scene.listen()
    await scene.store(0, 5)
    await scene.until_found(5)
    await scene.engine.stop()
    await scene.until_found(0)
    await scene.engine.start()
    await scene.engine.subscribed()
    await scene.store(0, 2)
    await scene.until_found(2)


async def test_an_engine_that_starts_again_is_asked_for_what_was_missed(scene: Scene) -> None:
    await scene.listen()
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
    await scene.listen()
    for number in range(3):
        await scene.store(number)
    await scene.until_found(3)
    scene.engine.begin_again()
    await scene.store(0)
    await scene.until_found(1)
    assert scene.cache.num_losses == 1


async def test_a_malformed_message_withdraws_what_may_be_wrong_now(scene: Scene) -> None:
    await scene.listen()
    await scene.store(0, 3)
    await scene.until_found(3)
    await scene.engine.send_raw([b"only two", b"frames"])
    await scene.engine.publish(b"\xc1nonsense")
    await scene.until_found(0)
    assert (scene.cache.num_malformed, scene.cache.num_losses, scene.cache.note) == (1, 1, "")
    await scene.store(0, 1)
    await scene.until_found(1)


async def test_what_routers_do_not_find_is_said(scene: Scene) -> None:
    await scene.listen()
    stored, tokens = scene.messages.stored, list(range(8))
    await scene.engine.publish(b"\xc1nonsense")
    await scene.until(lambda: scene.cache.note.startswith("none of its KV events can be read: "))
    await scene.engine.publish(scene.messages.payload(stored([1], None, tokens, kv_cache_spec_kind="sliding_window")))
    await scene.until(lambda: "its KV events tell of sliding_window alone, not of full" in scene.cache.note)
    await scene.engine.publish(scene.messages.payload(stored([1], None, tokens)))
    await scene.until(lambda: scene.cache.note == f"1 of its KV blocks are not found: events have {MISFIT}")
    await scene.store(0, 1)
    await scene.until_found(1)


async def test_an_engine_with_other_blocks_ends_the_stream(scene: Scene) -> None:
    await scene.listen()
    event = scene.messages.stored([1], None, list(range(32)), block_size=32)
    await scene.engine.publish(scene.messages.payload(event))
    with pytest.raises(ConfigError, match="start vLLM with --block-size 4"):
        await scene.until(lambda: False)


async def test_two_ranks_in_one_stream_end_it(scene: Scene) -> None:
    await scene.listen()
    for rank in (0, 1):
        await scene.engine.publish(Messages(rank=rank).payload())
    with pytest.raises(ProtocolError, match="ranks 0 and 1"):
        await scene.until(lambda: False)


async def test_an_engine_that_is_not_there_is_told_in_time() -> None:
    stream = VllmStream("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", timeout_s=0.2)
    with pytest.raises(UnavailableError, match=r"no vLLM at tcp://127.0.0.1:1 within 0.2 s"):
        await asyncio.wait_for(stream.open(), 30)
    await stream.close()


async def test_a_replay_endpoint_that_does_not_answer_is_told_in_time(engine: Engine) -> None:
    stream = VllmStream(engine.endpoint, "tcp://127.0.0.1:1", timeout_s=0.3)
    await stream.open()
    with pytest.raises(UnavailableError, match="replay endpoint"):
        await asyncio.wait_for(anext(aiter(stream.messages())), 30)
    await stream.close()


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://", "http://host:1"])
async def test_an_impossible_endpoint_is_refused(endpoint: str) -> None:
    stream = VllmStream(endpoint, endpoint, timeout_s=1)
    with pytest.raises(ConfigError, match="events"):
        await stream.open()
    await stream.close()
