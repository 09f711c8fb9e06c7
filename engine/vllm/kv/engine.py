"""A VllmEngine whose workers share KV: prompts that are sent, and requests whose prompt another worker computes.

What vLLM says of its blocks (link.py) becomes what roles ask of our own engine: reserve, admit, release; on_batch,
unpin.
"""

import time
from collections.abc import Callable, Sequence as Run
from typing import Any

from msgspec.structs import replace

from baton_proto.discovery import WorkerLoad
from baton_proto.sampling import TokenLogprobs
from engine.sequences.batch import Batch, LayerDone, ScheduledSequence
from engine.sequences.output import SequenceOutput, StepOutput, finish_reason
from engine.sequences.sequence import Sequence, SequenceStatus
from engine.vllm.cache import VllmCache
from engine.vllm.engine import VllmEngine
from engine.vllm.kv.books import FETCH, PARAMETER, SEND
from engine.vllm.kv.link import WorkerEnd
from engine.vllm.kv.messages import Arrived, Chunk, LayerComputed, Refused, Reserved, Sent, StepBegins
from engine.vllm.sampling import repeats
from runtime.errors import UnavailableError


class SharingEngine(VllmEngine):
    """Implements `engine.interface.KvEngine`. Event loop only."""

    def __init__(self, llm: Any, cache: VllmCache, eos_token_ids: frozenset[int], link: WorkerEnd) -> None:
        super().__init__(llm, cache, eos_token_ids)
        self.on_batch: Callable[[Batch], LayerDone | None] | None = None
        self.link = link
        self._fetching: set[str] = set()  # asked for blocks, and neither admitted nor released
        self._with_vllm: dict[str, Sequence] = {}  # prompts that are sent, whose blocks vLLM keeps
        # Prompts that are sent, and are computed (None) or ended by vLLM (their end), but not both yet.
        self._half_ended: dict[str, SequenceOutput | None] = {}
        self._begun_again: set[str] = set()  # behind the first token that another engine drew
        self._chunks: list[Chunk] = []  # of the running step
        self._layer_done: LayerDone | None = None
        self._begun_step_s = 0.0

    # --- a request whose prompt another worker computes ---------------------------------------------------------------

    def follows(self, sequence: Sequence, leaders: Run[Sequence]) -> bool:
        """Always False: vLLM finds only the prefixes that it holds."""
        return False

    def restores(self, sequence: Sequence) -> bool:
        """Always True: vLLM has been asked for this sequence's blocks, and may be asked for others meanwhile."""
        return True

    def reserve(self, sequence: Sequence) -> bool:
        """Asks vLLM for blocks, once. True as soon as they are there."""
        name = sequence.request_id
        if name not in self._fetching:
            self._fetching.add(name)
            self.add(sequence)
            self._waiting.pop(name, None)  # its prompt is not computed here
        return sequence.status is SequenceStatus.REMOTE

    def forgo(self, sequence: Sequence) -> None:
        """Nobody waits for its blocks any more."""
        if sequence.status is SequenceStatus.REMOTE:
            self.release(sequence)
        else:
            self._fetching.discard(sequence.request_id)
            self.abort(sequence.request_id)

    def admit(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceOutput | None:
        """The answer begins with the token that the prefill worker drew. Because vLLM takes no token from another
        engine, it draws the same one again, which the client does not get. None: vLLM's own is the first."""
        self._fetching.remove(sequence.request_id)
        sequence.status = SequenceStatus.RUNNING
        self.link.send(Arrived(sequence.request_id))
        if token_id == NO_TOKEN or repeats(sequence.sampling):
            return None
        self._repeated[sequence.request_id] = [token_id]
        sequence.token_ids.append(token_id)
        finish, stop_token = finish_reason(sequence, token_id, self._eos_token_ids)
        if finish is not None:
            sequence.status = SequenceStatus.FINISHED  # and vLLM caches its prompt as it draws the token
        drawn = [] if logprobs is None else [logprobs]
        return SequenceOutput(sequence, [token_id], drawn, finish, stop_token)

    def _turned(self, sequence: Sequence) -> SequenceOutput | None:
        """Two engines draw different tokens where two are as likely but for the last bits. The answer goes on behind
        the one that the client has, as a replay does."""
        if repeats(sequence.sampling):
            return super()._turned(sequence)
        self.abort(sequence.request_id)
        sequence.status = SequenceStatus.RUNNING
        self._begun_again.add(sequence.request_id)
        self.add(sequence)
        return None

    def _name(self, request_id: str) -> str:
        return request_id + AGAIN * (request_id in self._begun_again)

    def _named(self, name: str) -> Sequence | None:
        """See `VllmEngine._named`; None also for news from before a request has begun again."""
        sequence = self._sequences.get(name.removesuffix(AGAIN))
        return sequence if sequence is not None and self._name(sequence.request_id) == name else None

    def release(self, sequence: Sequence) -> None:
        """vLLM ends a request whose blocks are bad. Invariant: nobody writes to them any more."""
        self._fetching.remove(sequence.request_id)
        self._forget(sequence.request_id)
        skip = sequence.num_computed_tokens // self.cache.block_size
        self.link.send(Refused(sequence.request_id, sequence.block_table[skip:]))

    def _reserved(self, message: Reserved) -> list[SequenceOutput]:
        """Returns the end of a request whose blocks nobody may write: vLLM lists one twice, or one that is none."""
        sequence = self._sequences.get(message.request_id)
        skip = message.skip_tokens // self.cache.block_size
        written = message.block_ids[skip:]
        if sequence is None or message.request_id not in self._fetching:
            self.link.send(Refused(message.request_id, written))
            return []
        sequence.block_table = message.block_ids
        sequence.found(message.skip_tokens)
        if len({*written}) < len(written) or not all(0 < block <= self.cache.num_blocks for block in written):
            self.release(sequence)
            return [SequenceOutput(sequence, [], [], "error", error=STRANGE_BLOCKS)]
        sequence.status = SequenceStatus.REMOTE
        return []

    # --- a prompt whose KV is sent ------------------------------------------------------------------------------------

    def unpin(self, sequence: Sequence) -> None:
        """Nobody reads the blocks of a prompt that has ended."""
        if self._with_vllm.pop(sequence.request_id, None) is not None:
            self.link.send(Sent(sequence.request_id))

    def add(self, sequence: Sequence) -> None:
        if sequence.prefill_only:
            self._with_vllm[sequence.request_id] = sequence
        super().add(sequence)

    def _refused(self, sequence: Sequence, error: Exception) -> None:
        self._with_vllm.pop(sequence.request_id, None)
        super()._refused(sequence, error)

    def _step_begins(self, message: StepBegins) -> list[SequenceOutput]:
        """Returns the ends of prompts that were preempted."""
        lost = [sequence for name in message.lost if (sequence := self.abort(name)) is not None]
        self._chunks = [chunk for chunk in message.chunks if chunk.request_id in self._sequences]
        self._begun_step_s = time.monotonic()
        for chunk in self._chunks:
            sequence = self._sequences[chunk.request_id]
            if not sequence.block_table:
                sequence.found(chunk.start)
            sequence.block_table += chunk.new_block_ids
        items = [
            ScheduledSequence(sequence, chunk.start, chunk.end - chunk.start, chunk.end == sequence.num_tokens)
            for chunk in self._chunks
            for sequence in [self._sequences[chunk.request_id]]
        ]
        self._layer_done = self.on_batch(Batch(items, [])) if self.on_batch is not None and items else None
        return [SequenceOutput(sequence, [], [], "error", error=PREEMPTED) for sequence in lost]

    def _step_ends(self) -> list[SequenceOutput]:
        """Returns the ends of prompts that are computed."""
        ends: list[SequenceOutput] = []
        now_s = time.monotonic()
        for chunk in self._chunks:
            sequence = self._sequences.get(chunk.request_id)
            if sequence is None:
                continue
            sequence.note_chunk(self._begun_step_s, now_s, chunk.end - chunk.start)
            self._prompt_tokens += chunk.end - chunk.start
            if chunk.end == sequence.num_tokens and (end := self._half_ends(sequence)) is not None:
                ends.append(end)
        self._chunks, self._layer_done = [], None
        return ends

    def _half_ends(self, sequence: Sequence, end: SequenceOutput | None = None) -> SequenceOutput | None:
        """The prompt is computed, or vLLM has ended it (`end`); None: the other one is still to come. Invariant: a
        prompt is committed only when both have come, because vLLM keeps its blocks from the request's end on, and
        until then may preempt it."""
        name = sequence.request_id
        if name not in self._half_ended:
            self._half_ended[name] = end
            return None
        end = end or self._half_ended[name]
        if end is not None:
            self._forget(name)
        return end

    def _prompt_end(self, sequence: Sequence, item: Any) -> SequenceOutput:
        """With the first token, unless the decode worker's vLLM has to draw it."""
        scores = self._prompt_logprobs(sequence, item)
        if repeats(sequence.sampling) or not item.new_token_ids:
            return SequenceOutput(sequence, [NO_TOKEN], [], "prefill", prompt_logprobs=scores)
        first, logprobs = item.new_token_ids[:1], self._logprobs(sequence, item)[:1]
        return SequenceOutput(sequence, first, logprobs, "prefill", prompt_logprobs=scores)

    def _forget(self, request_id: str) -> Sequence | None:
        self._half_ended.pop(request_id, None)
        self._begun_again.discard(request_id)
        return super()._forget(request_id)

    # --- what vLLM says -----------------------------------------------------------------------------------------------

    def take_kv_news(self) -> StepOutput | None:
        """Takes what vLLM's connector has said; None: nothing. Raises UnavailableError when vLLM has ended, or
        ProtocolError."""
        news = self.link.news()
        if news is None:
            raise UnavailableError("vLLM's computing process has ended")
        ends: list[SequenceOutput] = []
        for message in news:
            match message:
                case Reserved():
                    ends += self._reserved(message)
                case StepBegins():
                    ends += self._step_begins(message)
                case LayerComputed():
                    if self._layer_done is not None:
                        self._layer_done(message.layer)
                    if message.ends:
                        ends += self._step_ends()
        return StepOutput(ends, []) if news else None

    def _news(self, sequence: Sequence, item: Any, timestamp_s: float) -> SequenceOutput | None:
        finish, _, error = self._finish(item)
        if sequence.status is SequenceStatus.FINISHED:  # with the prefill worker's token
            end = self._forget if finish is not None else self.abort
            end(sequence.request_id)
            return None
        if not sequence.prefill_only or error is not None:
            return super()._news(sequence, item, timestamp_s)
        return None if finish is None else self._half_ends(sequence, self._prompt_end(sequence, item))

    # --- questions ----------------------------------------------------------------------------------------------------

    def load(self) -> WorkerLoad:
        """With the blocks of prompts that have ended here and are still read, and of those whose KV is to come: vLLM
        tells its use of blocks with a step, and none of these needs one."""
        own = super().load()
        held = [one for name, one in self._with_vllm.items() if name not in self._sequences]
        held += [one for one in self._sequences.values() if one.status is SequenceStatus.REMOTE]
        return replace(own, blocks_used=max(own.blocks_used, sum(len(one.block_table) for one in held)))

    def check_integrity(self) -> list[str]:
        here = self._sequences
        remote = {name for name, one in here.items() if one.status is SequenceStatus.REMOTE}
        sent = {name for name, one in here.items() if one.prefill_only}
        wrong = {
            "is to get its KV without being registered": self._fetching - here.keys(),
            "has blocks for its KV, which nobody brings": remote - self._fetching,
            "sends its KV from blocks that vLLM does not keep": sent - self._with_vllm.keys(),
            "has ended by half, and sends no KV": self._half_ended.keys() - sent,
        }
        return super().check_integrity() + [f"{name} {what}" for what, names in wrong.items() for name in sorted(names)]

    def _transfer(self, sequence: Sequence) -> dict[str, Any]:
        way = SEND if sequence.prefill_only else FETCH if sequence.request_id in self._fetching else None
        of_connector = {"kv_transfer_params": {PARAMETER: way}}
        return {"extra_args": sequence.sampling.vllm_xargs | of_connector} if way else {}


STRANGE_BLOCKS = "vLLM gave it KV blocks that another worker must not write"
PREEMPTED = "vLLM preempted the prompt before its KV was sent"
NO_TOKEN = 0
"""To the decode worker: its vLLM draws the first token. A first token of this number is drawn there, too."""
AGAIN = "+"  # behind a request's name in vLLM; no name of a sequence ends so
