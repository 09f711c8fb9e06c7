"""A vLLM server as worker/ sees an engine: sequences go in, the news of its streams come out."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from baton_proto.discovery import WorkerLoad
from baton_proto.sampling import PromptLogprobs, TokenLogprobs
from engine.sequences.output import SequenceOutput
from engine.sequences.sequence import Sequence
from engine.vllm.engine import VllmEngine
from engine.vllm.server.cache import ExternalCache
from engine.vllm.server.completion import Completion, Item, completion
from engine.vllm.server.core import News, ServerCore
from engine.vllm.server.prompt_times import PromptTimes


class ExternalEngine(VllmEngine):
    """Others may ask the server too: their requests and blocks count in the load as its metrics told last. Event loop
    only."""

    def __init__(self, core: ServerCore, cache: ExternalCache, model: str, eos_token_ids: frozenset[int]) -> None:
        """model: the server's name for it."""
        super().__init__(SimpleNamespace(engine_core=core), cache, eos_token_ids)
        self.cache: ExternalCache = cache
        self._model = model
        self._others = 0  # requests
        self._prompt_times = PromptTimes()
        self._ended = 0  # of our requests, since the metrics told last
        self._blocks_used = 0
        self.offers_nothing = False  # of the KV of a prompt that was computed for another server
        self._unfollowed = 0  # losses of events, and blocks that were left out, when last looked at

    def add(self, sequence: Sequence) -> None:
        """Because the server does not tell how much of a prompt it had cached, we look into our copy of its books."""
        full = (sequence.num_tokens - 1) // self.cache.block_size  # the last token is always computed
        sequence.hash_blocks(full, self.cache.block_size)
        cached = sequence.sequence_hashes if sequence.sampling.prompt_logprobs is None else ()
        sequence.found(self.cache.num_held(cached) * self.cache.block_size)
        self._begun_s[sequence.request_id] = time.monotonic()  # nor when it begins
        super().add(sequence)

    def _note_step(self, outputs: News) -> None:
        super()._note_step(outputs)
        if (stats := outputs.scheduler_stats) is not None:
            self._blocks_used = self.cache.num_used
            # The metrics may still have those of ours that have ended since: too few of others are better than ghosts.
            ours = len(self._sequences) + self._ended
            self._others = max(0, stats.num_running_reqs + stats.num_waiting_reqs - ours)
            self._ended = 0
            unfollowed = self.cache.num_losses + self.cache.blocks.skipped.total()
            self.cache.told.look(outputs.timestamp, is_blind=unfollowed != self._unfollowed)
            self._unfollowed = unfollowed

    def _forget(self, request_id: str) -> Sequence | None:
        sequence = super()._forget(request_id)
        self._ended += sequence is not None
        return sequence

    def load(self) -> WorkerLoad:
        own = super().load()
        return replace(own, running=own.running + self._others, blocks_used=self._blocks_used)

    def _note_prompt(self, sequence: Sequence, item: Any, end_s: float) -> None:
        super()._note_prompt(sequence, item, end_s)
        sequence.seen = item.seen
        if sequence.sequence_hashes and not (
            sequence.images or sequence.pooling
        ):  # the server alone knows the tokens of images
            self.cache.told.computed(sequence.sequence_hashes[-1], end_s)
        if self._others:
            self._prompt_times.forget()
            return
        if sequence.transfer or sequence.sampling.prompt_logprobs is not None:
            return  # another server has computed it, or the first token came with the last one
        begun_s, _, tokens = sequence.chunks[-1]
        beside = len(self._sequences) - len(self._waiting) - 1
        facts = (tokens, len(self._prompt(sequence)) - tokens, beside, self._context_tokens() - sequence.num_tokens)
        if (step := self._prompt_times.computed(begun_s, end_s, *facts)) is not None:
            self.timed_steps.keep(step)

    def _made_late(self, sequence: Sequence) -> bool:
        return sequence.pooling is None and super()._made_late(sequence)

    async def _made_elsewhere(self, sequence: Sequence) -> Completion:
        """The server makes prompts with images."""
        return await asyncio.to_thread(self._request, sequence)

    def _request(self, sequence: Sequence, made: None = None) -> Completion:
        return completion(sequence, self._prompt(sequence), self._model, self._eos_token_ids)

    def _logprobs(self, sequence: Sequence, item: Any) -> list[TokenLogprobs]:
        wanted, ids = sequence.sampling.logprobs, sequence.sampling.logprob_token_ids
        if ids:
            told = [(row.logprob, dict(row.top)) for row in item.new_logprobs]
            names = [dict.fromkeys((sampled, *ids)) for sampled in item.new_token_ids]
            return [
                TokenLogprobs(logprob, [(one, top[one]) for one in asked])
                for (logprob, top), asked in zip(told, names, strict=True)
            ]
        return [] if wanted is None else [TokenLogprobs(row.logprob, row.top[:wanted]) for row in item.new_logprobs]

    def _prompt_logprobs(self, sequence: Sequence, item: Any) -> PromptLogprobs | None:
        told: PromptLogprobs | None = item.prompt_logprobs
        return told

    def _news(self, sequence: Sequence, item: Item, timestamp_s: float) -> SequenceOutput | None:
        output = super()._news(sequence, item, timestamp_s)
        if item.new_token_ids:  # the KV has arrived, or here is where it lies
            sequence.transfer = item.transfer
            self.offers_nothing = sequence.prefill_only and not item.transfer
        return None if output is None else replace(output, refused=item.refused or output.refused)

    def _pooled(self, item: Item) -> bytes:
        return item.pooled
