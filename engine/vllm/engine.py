"""One AsyncLLM as worker/ sees an engine: sequences go in, one StepOutput per step of vLLM's comes out.

Requests go to vLLM's core process and its outputs are taken from it without the request objects, queues and texts that
AsyncLLM makes of them: token ids go in and out, and the news of a step stay together. Event loop only.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import structlog

from baton_proto.discovery import Pace, WorkerLoad
from baton_proto.kv_events import KvEvent, Stored
from baton_proto.sampling import PromptLogprobs, TokenLogprobs
from engine.interface import Counts
from engine.sequences.output import SequenceOutput, StepOutput
from engine.sequences.sequence import Sequence, SequenceStatus
from engine.vllm.adapters import VllmAdapters
from engine.vllm.cache import VllmCache, salt_of
from engine.vllm.image_prompts import ImagePrompts
from engine.vllm.pooling import pooled_bytes, pooling_params
from engine.vllm.prompt_scores import scores_of
from engine.vllm.sampling import first_token_alone, repeats, vllm_grammar, vllm_sampling
from engine.vllm.steps import VllmSteps
from runtime.config.planner import TargetsConfig

log = structlog.get_logger()

REFUSALS = (ValueError, TypeError, KeyError, AssertionError)
"""What vLLM's checks of a request raise, and from 0.32 on CLIENT_ERROR."""
CLIENT_ERROR = "VLLMClientError"
FINISHES = ("stop", "length", "repetition")
"""Ours and vLLM's; any other one is an error."""
OTHER_TURN = "recomputing the answer gave other tokens than those already sent"


class VllmEngine:
    """Implements `engine.interface.Engine`. Steps and the memory of blocks are vLLM's own."""

    def __init__(self, llm: Any, cache: VllmCache, eos_token_ids: frozenset[int]) -> None:
        """llm: an AsyncLLM whose own output handler does not run."""
        self.cache = cache
        self.timed_steps = VllmSteps()
        self._prompt_tokens = self._preemptions = 0
        self._llm = llm
        self.adapters = VllmAdapters(llm)
        self._eos_token_ids = eos_token_ids
        self._sequences: dict[str, Sequence] = {}
        self._waiting: dict[str, Sequence] = {}  # without a first token
        self._repeated: dict[str, list[int]] = {}  # what the client has of answers that begin again, and vLLM has not
        self._begun_s: dict[str, float] = {}  # when vLLM began a waiting one, on time.monotonic()
        self._dead_ends: list[SequenceOutput] = []
        self._num_running = 0
        self._sending: set[asyncio.Task[None]] = set()
        self._image_prompts = ImagePrompts(llm)
        self.wake: Callable[[], None] = lambda: None  # somebody shall take the dead ends

    # --- sequences come and go ----------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """A sequence that vLLM refuses ends with finish "error"."""
        self._sequences[sequence.request_id] = self._waiting[sequence.request_id] = sequence
        if sequence.num_output_tokens and not sequence.prefill_only and repeats(sequence.sampling):
            self._repeated[sequence.request_id] = sequence.token_ids[sequence.num_prompt_tokens :]
        if self._made_late(sequence):
            self._send(self._add_later(sequence))
            return
        try:
            request = self._request(sequence)
        except Exception as error:  # also what vLLM asserts of a request
            self._refused(sequence, error)
        else:
            self._send(self._llm.engine_core.add_request_async(request))

    def _made_late(self, sequence: Sequence) -> bool:
        has_grammar = sequence.sampling.grammar is not None and not sequence.prefill_only
        return has_grammar or bool(sequence.images) or sequence.pooling is not None

    async def _add_later(self, sequence: Sequence) -> None:
        try:
            request = await self._made_elsewhere(sequence)
        except Exception as error:  # also when no thread can be started, or there is no memory
            self._refused(sequence, error)
            self.wake()
            return
        if self._sequences.get(sequence.request_id) is sequence:  # else it was aborted
            await self._llm.engine_core.add_request_async(request)

    async def _made_elsewhere(self, sequence: Sequence) -> Any:
        """The request, made on a thread, because vLLM compiles a grammar to check it, and pictures are large."""
        if sequence.pooling is not None:
            params = pooling_params(sequence.pooling)
            return self._checked(sequence, self._tokens(sequence), params, await self._llm.get_supported_tasks())
        made = (await self._image_prompts.make(sequence, self._prompt(sequence)),) if sequence.images else ()
        return await asyncio.to_thread(self._request, sequence, *made)

    def _refused(self, sequence: Sequence, error: Exception) -> None:
        if self._forget(sequence.request_id) is sequence:
            refused = isinstance(error, REFUSALS) or any(of.__name__ == CLIENT_ERROR for of in type(error).__mro__)
            output = SequenceOutput(sequence, [], [], "error", error=f"vLLM: {error}", refused=refused)
            self._dead_ends.append(output)

    def abort(self, request_id: str) -> Sequence | None:
        """Ends a sequence without an output, and returns it; None when there is none."""
        name = self._name(request_id)
        sequence = self._forget(request_id)
        if sequence is not None:
            self._send(self._llm.engine_core.abort_requests_async([name]))
        return sequence

    def _name(self, request_id: str) -> str:
        """vLLM's name for a sequence."""
        return request_id

    def _named(self, name: str) -> Sequence | None:
        """The sequence of this name in vLLM; None: it is gone."""
        return self._sequences.get(name)

    def _request(self, sequence: Sequence, made: Any = None) -> Any:
        """An EngineCoreRequest. `made`: of a prompt with images. Raises what vLLM's checks raise."""
        from vllm import SamplingParams
        from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

        sampling, tokens = sequence.sampling, self._prompt(sequence)
        arguments = vllm_sampling(sampling, len(tokens) - sequence.num_prompt_tokens, self._eos_token_ids)
        if sequence.prefill_only:
            arguments |= first_token_alone(arguments)
        elif sampling.grammar is not None:
            arguments["structured_outputs"] = StructuredOutputsParams(**vllm_grammar(sampling.grammar))
        if sampling.repetition_detection:
            arguments["repetition_detection"] = RepetitionDetectionParams(**sampling.repetition_detection)
        arguments |= self._transfer(sequence)
        return self._checked(sequence, made or self._tokens(sequence), SamplingParams(**arguments), ("generate",))

    def _tokens(self, sequence: Sequence) -> Any:
        from vllm.inputs import TokensPrompt

        return TokensPrompt(type="token", prompt_token_ids=self._prompt(sequence))

    def _checked(self, sequence: Sequence, prompt: Any, params: Any, tasks: Collection[str]) -> Any:
        """`tasks`: what the model can do."""
        if (salt := salt_of(sequence.hash_seed)) is not None:
            prompt["cache_salt"] = salt
        return self._llm.input_processor.process_inputs(
            self._name(sequence.request_id),
            prompt,
            params,
            tasks,
            priority=-sequence.priority,
            lora_request=self.adapters.request(sequence.adapter),
        )

    def _prompt(self, sequence: Sequence) -> list[int]:
        """What vLLM takes for the prompt when it begins."""
        whole = sequence.request_id not in self._repeated
        return sequence.token_ids[: None if whole else sequence.num_prompt_tokens]

    def _transfer(self, sequence: Sequence) -> dict[str, Any]:
        """What vLLM's KV connector has to know of a request, as arguments for vllm.SamplingParams."""
        return {}

    def _send(self, message: Coroutine[Any, Any, None]) -> None:
        """Messages leave in the order of the calls, because tasks begin in order and a message leaves at once."""
        task = asyncio.ensure_future(message)
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: "asyncio.Task[None]") -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.warning("vLLM's core does not listen", error=str(error))  # next_step() raises what happened

    def _forget(self, request_id: str) -> Sequence | None:
        self._waiting.pop(request_id, None)
        self._begun_s.pop(request_id, None)
        self._repeated.pop(request_id, None)
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            sequence.status = SequenceStatus.FINISHED
        return sequence

    # --- steps --------------------------------------------------------------------------------------------------------

    async def next_step(self) -> StepOutput:
        """The news of vLLM's next step. Raises what vLLM raises when its core has ended."""
        outputs = await self._llm.engine_core.get_output_async()
        self._note_step(outputs)
        news = []
        for item in outputs.outputs:  # one after the other: news may end a sequence, or give it another name
            if (sequence := self._named(item.request_id)) is not None:
                output = self._news_or_end(sequence, item, outputs.timestamp)
                if output is not None:
                    news.append(output)
        return StepOutput(news, [], num_tokens=len(news))

    def _news_or_end(self, sequence: Sequence, item: Any, timestamp_s: float) -> SequenceOutput | None:
        """News that cannot be read end their request, and nobody else's."""
        try:
            return self._news(sequence, item, timestamp_s)
        except Exception as error:
            log.exception("news of a request that cannot be read", request_id=sequence.request_id)
            self.abort(sequence.request_id)
            return SequenceOutput(sequence, [], [], "error", error=f"vLLM's answer cannot be read: {error}")

    def take_dead_ends(self) -> list[SequenceOutput]:
        """Sequences that ended before vLLM had them."""
        ended, self._dead_ends = self._dead_ends, []
        return ended

    def _note_step(self, outputs: Any) -> None:
        stats = outputs.scheduler_stats
        if stats is None:
            return
        self._num_running = stats.num_running_reqs
        self.cache.num_used = round(stats.kv_cache_usage * self.cache.num_blocks)
        self.timed_steps.add(stats, outputs.timestamp, self._context_tokens())

    def _news(self, sequence: Sequence, item: Any, timestamp_s: float) -> SequenceOutput | None:
        """Makes the output of vLLM's news; None while nothing is new to the client."""
        request_id = sequence.request_id
        self._note_events(request_id, item)
        pooled = self._pooled(item)
        is_first = bool(item.new_token_ids or pooled) and request_id in self._waiting
        if is_first:
            self._note_prompt(sequence, item, timestamp_s)
        finish, stop_token, error = self._finish(item)
        num_known, goes_on = self._compared(request_id, item)
        if not goes_on and error is None:
            return self._turned(sequence)
        new, logprobs = item.new_token_ids[num_known:], self._logprobs(sequence, item)[num_known:]
        sequence.token_ids += new
        if finish is not None:
            self._forget(request_id)
        elif not new:
            return None
        scores = self._prompt_logprobs(sequence, item) if is_first else None
        return SequenceOutput(sequence, new, logprobs, finish, stop_token, error, scores, pooled=pooled)

    def _pooled(self, item: Any) -> bytes:
        """See Delta.pooled."""
        return b"" if item.pooling_output is None else pooled_bytes(item.pooling_output)

    def _turned(self, sequence: Sequence) -> SequenceOutput | None:
        """vLLM has computed again what the client has, and has come to other tokens."""
        self.abort(sequence.request_id)
        return SequenceOutput(sequence, [], [], "error", error=OTHER_TURN, refused=True)

    def _compared(self, request_id: str, item: Any) -> tuple[int, bool]:
        """How many of these tokens the client has, and whether they are what it has."""
        known = self._repeated.get(request_id)
        if not known:
            return 0, True
        again = item.new_token_ids[: len(known)]
        equal = list(again) == known[: len(again)]
        del known[: len(again)]
        return len(again), equal and (item.finish_reason is None or not known)

    def _finish(self, item: Any) -> tuple[str | None, int | None, str | None]:
        """(finish, stop token, error)."""
        if item.finish_reason is None:
            return None, None, None
        reason = str(item.finish_reason)
        if reason not in FINISHES:
            return "error", None, f"vLLM ended the request: {reason}"
        stop_token = item.new_token_ids[-1] if reason == "stop" and item.new_token_ids else None
        return reason, stop_token, None

    def _note_events(self, request_id: str, item: Any) -> None:
        for event in item.events or ():
            name = event.type.name
            self._preemptions += name == "PREEMPTED"
            if name == "SCHEDULED" and request_id in self._waiting:
                self._begun_s.setdefault(request_id, event.timestamp)

    def _note_prompt(self, sequence: Sequence, item: Any, end_s: float) -> None:
        """The first token: the prompt is computed."""
        del self._waiting[sequence.request_id]
        length = len(self._prompt(sequence))
        stats = getattr(item, "prefill_stats", None) or item
        cached = getattr(stats, "num_cached_tokens", sequence.num_cached_tokens)  # a server does not tell it
        sequence.found(max(0, min(cached, length - 1)))
        computed = length - sequence.num_cached_tokens
        self._prompt_tokens += computed
        sequence.note_chunk(self._begun_s.pop(sequence.request_id, end_s), end_s, computed)

    def _logprobs(self, sequence: Sequence, item: Any) -> list[TokenLogprobs]:
        """vLLM's rows have the sampled token first, then the best ones or those that were asked for."""
        wanted, rows = sequence.sampling.logprobs, item.new_logprobs
        if wanted is None or rows is None:
            return []
        ids, values = rows[0].tolist(), rows[1].tolist()
        first = 0 if sequence.sampling.logprob_token_ids else 1
        return [
            TokenLogprobs(of[0], list(dict(zip(row[first : 1 + wanted], of[first : 1 + wanted], strict=True)).items()))
            for row, of in zip(ids, values, strict=True)
        ]

    def _prompt_logprobs(self, sequence: Sequence, item: Any) -> PromptLogprobs | None:
        """With the first token."""
        wanted = sequence.sampling.prompt_logprobs
        if wanted is None:
            return None
        return scores_of(sequence.num_prompt_tokens, wanted, item.new_prompt_logprobs_tensors)

    # --- questions ----------------------------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        """All but the leases and the last event id. Prompts that wait count with all of their tokens."""
        cache, total = self.cache, len(self._sequences)
        if not total:
            cache.num_used = self._num_running = 0  # an abort is no step
        running = min(self._num_running, total)
        queued = [sequence.num_tokens for sequence in self._waiting.values() if not sequence.transfer]
        return WorkerLoad(
            running=running,
            waiting=total - running,
            blocks_used=cache.num_used,
            blocks_cached=cache.num_cached,
            blocks_total=cache.num_blocks,
            queued_prefill_tokens=sum(queued),
            queued_prefill_pairs=sum(tokens * tokens // 2 for tokens in queued),
            steps=self.timed_steps.num_steps,
            step_ms=self.timed_steps.last_ms,
            adapters=self._adapters_asked_for(),
        )

    def _adapters_asked_for(self) -> tuple[str, ...]:
        return tuple({one.adapter for one in self._sequences.values() if one.adapter}) if self.adapters.names else ()

    def pace(self) -> Pace:
        return Pace(self._context_tokens(), self.timed_steps.take())

    def counts(self) -> Counts:
        return Counts(prompt_tokens=self._prompt_tokens, preemptions=self._preemptions)

    def snapshot(self) -> tuple[list[KvEvent], list[Stored]]:
        """The table as far as it was told; events are published when they arrive."""
        return [], self.cache.blocks.runs()

    def aim(self, targets: TargetsConfig) -> None:
        """Does nothing: vLLM decides how long its steps last."""

    def forget_cache(self, *, keep: bool) -> list[KvEvent]:
        """Does nothing: vLLM empties its cache as it falls asleep, see VllmMemory."""
        return []

    def flush(self) -> bool:
        """Always False: vLLM's cache ends with it."""
        return False

    def _context_tokens(self) -> int:
        """Tokens of all sequences that decode."""
        return sum(sequence.num_tokens for key, sequence in self._sequences.items() if key not in self._waiting)

    def check_integrity(self) -> list[str]:
        """What is wrong with the books, in sentences; empty when all is well."""
        strangers = self._waiting.keys() - self._sequences.keys()
        return [f"{name} waits without being registered" for name in strangers]
