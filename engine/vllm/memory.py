"""The memory of vLLM's engine for sleep and wake. Levels and tags are vLLM's, so they are passed on as they are."""

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from baton_proto.worker import LAST_STEPS_S, TAGS, WEIGHTS
from engine.sequences.output import StepOutput
from engine.vllm.cache import VllmCache
from engine.vllm.loop import VllmLoop
from runtime.errors import ModelError, UnavailableError

if TYPE_CHECKING:
    from engine.model.checkpoint import Checkpoint


ASK_AGAIN_S: Final = (0.01, 0.5)  # first and at most; vLLM logs each time that it cannot


class FixedMemory:
    """Implements `engine.interface.Memory` for a server that others use too: it neither sleeps nor takes new weights
    at our word. Event loop only."""

    problem = ""  # the weights are never half replaced by us
    no_update = "an external worker takes no new weights: start its engine with them"

    def __init__(self, fingerprint: str) -> None:
        """fingerprint: that of our own copy of the weights, because vLLM tells none."""
        self.fingerprint = fingerprint

    @property
    def asleep(self) -> tuple[str, ...]:
        return ()

    def sleep(self, level: int) -> int | Awaitable[int]:
        raise UnavailableError("an external worker does not sleep: whoever started its engine ends it")

    def wake(self, tags: tuple[str, ...]) -> Awaitable[None] | None:
        return None

    def opened(self, folder: Path) -> "Checkpoint":
        raise ModelError(WEIGHTS, self.no_update)

    def read(self, checkpoint: "Checkpoint") -> None:
        raise ModelError(WEIGHTS, self.no_update)


class VllmMemory(FixedMemory):
    no_update = "a worker with vLLM takes no new weights: start another one with them"

    def __init__(self, llm: Any, cache: VllmCache, fingerprint: str, *, on_cpu: bool) -> None:
        """On a CPU vLLM sleeps without giving memory back."""
        super().__init__(fingerprint)
        self._on_cpu = on_cpu
        self._cannot_sleep = not on_cpu and not getattr(llm.vllm_config.model_config, "enable_sleep_mode", False)
        self.loop: VllmLoop | None = None  # set when there is one
        self._llm = llm
        self._cache = cache
        self._asleep: set[str] = set()
        self._dropped = False  # vLLM has no copy of the sleeping weights

    @property
    def asleep(self) -> tuple[str, ...]:
        return tuple(tag for tag in TAGS if tag in self._asleep)

    async def sleep(self, level: int) -> int:
        """Empties the prefix cache too, and tells routers so now: vLLM tells it with its next step. Returns 0, because
        vLLM does not say how many bytes came free. Raises UnavailableError."""
        if self._cannot_sleep:
            raise UnavailableError("vLLM sleeps on GPUs with `vllm: {enable_sleep_mode: true}` alone")
        try:
            if not self._asleep:
                await self._empty()
            if self.loop is not None:
                self.loop.tell(StepOutput([], self._cache.forget()))
            await self._llm.engine_core.sleep_async(level)
        except UnavailableError:
            raise
        except Exception as error:  # vLLM raises the text of what its core raised
            raise UnavailableError(f"vLLM: {error}") from error
        self._asleep, self._dropped = set(TAGS), level > 1 and not self._on_cpu
        return 0

    async def _empty(self) -> None:
        """vLLM forgets its prefixes. Because the blocks of an answer that ended with the prefill worker's token, and
        those of a prompt whose KV was just sent, come free with a later step of vLLM's, it is asked again until then.
        Raises UnavailableError."""
        deadline_s = time.monotonic() + LAST_STEPS_S
        pause_s, longest_s = ASK_AGAIN_S
        while not await self._llm.engine_core.reset_prefix_cache_async():
            if time.monotonic() >= deadline_s:
                raise UnavailableError(f"vLLM still uses KV blocks after {LAST_STEPS_S:g} s: try again")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def wake(self, tags: tuple[str, ...]) -> None:
        """Raises UnavailableError."""
        try:
            await self._llm.engine_core.wake_up_async(list(tags))
            if WEIGHTS in tags and self._dropped:
                await self._llm.engine_core.collective_rpc_async("reload_weights")
                self._dropped = False
        except Exception as error:  # as above
            raise UnavailableError(f"vLLM: {error}") from error
        self._asleep -= set(tags)
