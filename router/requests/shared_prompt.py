"""The one prompt of a request's choices: the first choice has it computed, and the others follow where it lies.

Because they wait for the first one's first token, a prompt is computed and shipped once. Their own first tokens come
later by a short step, so a prompt that is about as short itself is not waited for.
"""

import asyncio
from typing import Final

from baton_proto.sampling import PromptLogprobs
from router.requests.request import GenerateRequest
from router.requests.spread import Spread
from runtime.discovery.worker_key import WorkerKey

LEAST_TOKENS: Final = 128


class SharedPrompt:
    def __init__(self, request: GenerateRequest, spread: Spread) -> None:
        """`spread`: of the choices of all requests."""
        first = request.sampling[0]
        wanted = first.prompt_logprobs is not None or len(request.prompt) >= LEAST_TOKENS
        self._is_waited_for = wanted and len(request.sampling) > 1
        self._spread = spread if len(request.sampling) > 1 else None
        self._done = asyncio.Event()
        self.num_tokens = len(request.prompt)  # images are more of them, once a server has told
        self.logprobs: PromptLogprobs | None = None  # where they are asked for, once it is computed
        self.died: set[WorkerKey] = set()  # decode workers that ended while they had a choice of the request
        self.lost: set[WorkerKey] = set()  # prefill workers that did not bring the prompt's KV

    @property
    def is_awaited(self) -> bool:
        """Whether choices wait for the first one."""
        return self._is_waited_for and not self._done.is_set()

    async def turn(self, index: int) -> None:
        """Returns when the choice may begin."""
        if index and self._is_waited_for:
            await self._done.wait()
        if self._spread is not None:
            await self._spread.turn()

    def computed(self) -> None:
        """The first choice has a token, or has ended."""
        self._done.set()
