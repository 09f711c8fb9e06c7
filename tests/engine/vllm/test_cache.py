"""vLLM's prefix cache in place of our own block manager."""

from engine.blocks.block_manager import BlockManager
from engine.core.engine import Engine
from engine.runners.timed_loop import TimedLoop
from engine.vllm.cache import VllmCache
from tests.worker.test_engine_bridge import CountingRunner
from worker.engine_bridge import EngineBridge


async def test_a_bridge_takes_an_engine_with_it() -> None:
    engine = Engine(
        CountingRunner(), BlockManager(4, 16), max_batch_tokens=16, max_running=1, eos_token_ids=frozenset()
    )
    engine.block_manager = VllmCache(16, 4)  # type: ignore[assignment]
    EngineBridge(engine, lambda output, load: None, TimedLoop)


def test_nothing_is_left_to_write_when_a_worker_drains() -> None:
    assert not VllmCache(16, 4).flush()
