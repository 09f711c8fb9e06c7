"""Runs batches on a GPU and waits for the GPU only where tokens are read.

A step is one small kernel that reads its indices from the host, a CUDA graph (decodes, drafts too) or launches (any
batch with a prompt chunk), and one small kernel that writes its tokens there. The tokens of a step feed the next step
on the device, so the next step can be submitted before the host has seen them. What depends on them, such as the mask
of a grammar, comes while the device computes the step: `draw` then samples the rows concerned once more, before the
next step reads their tokens. On a CPU the same code runs in Triton's interpreter, for tests.
"""

import itertools
from collections.abc import Callable, Sequence as Run
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton_proto.sampling import SamplingParams
from engine.cuda.decode_graphs import LARGEST_GRAPH, DecodeGraphs
from engine.cuda.graph_recorder import GraphRecorder
from engine.cuda.mask_buffer import MaskBuffer
from engine.cuda.prompt_graphs import PromptGraphs, without_graphs
from engine.cuda.repeated_attention import LayerAddresses, RepeatedAttention, layer_addresses
from engine.cuda.step_inputs import StepBuffer, StepInputs, rows_of
from engine.cuda.triton_attention import TritonAttention
from engine.kernels.copy_words import copy_words
from engine.kernels.sampling import MaskedRows, VocabularySplit, partial_buffer, sample
from engine.model.attention import Caches, LayerAttention, StepAttention
from engine.model.families.llama import Llama
from engine.model.shard import vocabulary_share
from engine.parallel.collective import Collective
from engine.runners.prompt_scores import ScoresOnTheWay, logits_in_parts, score, scored_rows
from engine.runners.sampler import Sampler, is_masked
from engine.runners.step_shape import DeviceDraw, DeviceStep, StepShape
from engine.sequences.batch import Batch, LayerDone, SampledToken, ScheduledSequence
from engine.sequences.moves import Move
from engine.sequences.sequence import Sequence, SequenceStatus, TokenScores

_ON_THE_WAY = 3  # steps whose tokens may be unread: depth + 1, and one that failed


@dataclass(slots=True)
class CudaStep:
    """Implements `engine.sequences.batch.StepOnItsWay`."""

    runner: "CudaRunner"
    shape: StepShape
    logits: Tensor | None
    sequences: list[Sequence]  # by sample
    scored: list[ScoresOnTheWay]
    known: dict[int, SampledToken] = field(default_factory=dict)  # tokens that were drawn on the host, by sample
    host: Tensor | None = None  # int32 [samples], pinned
    copied: torch.cuda.Event | None = None

    def draw(self) -> None:
        self.known = self.runner.draw(self.shape, self.logits, self.sequences)
        self.logits = None
        self.host, self.copied = self.runner.read_back(len(self.sequences))

    def tokens(self) -> Run[SampledToken]:
        assert self.host is not None, "the step was drawn"
        if self.copied is not None:
            self.copied.synchronize()
        tokens = [SampledToken(token_id, None) for token_id in self.host.tolist()]
        for index, token in self.known.items():
            tokens[index] = token
        return tokens

    def scores(self) -> Run[TokenScores]:
        return [scores.landed() for scores in self.scored]


class CudaRunner:
    """Implements `engine.sequences.batch.Runner`. Owned by the engine thread.

    With several ranks, batches are submitted to rank 0's runner, which tells the other ranks the packed words; theirs
    `follow`.
    """

    depth = 1

    def __init__(
        self,
        model: Llama,
        attentions: Run[TritonAttention],
        caches: Caches,
        sampled: Tensor,
        buffer: StepBuffer,
        masks: MaskBuffer,
        sampler: Sampler,
        max_rows: int,
        collective: Collective | None = None,
    ) -> None:
        """attentions: of each layer. sampled: int32 [most tokens of a step], the tokens that a step samples; the
        model's `embed` reads it."""
        self.tell: Callable[[DeviceStep | DeviceDraw], object] | None = None  # called before it runs here
        self.num_layers = model.config.num_layers
        self._model = model
        self._attentions = attentions
        self._caches = caches
        self._sampled = sampled
        self._buffer = buffer
        self._masks = masks
        self._sampler = sampler
        self._collective = collective
        self._vocab_size = model.config.vocab_size
        self._share = vocabulary_share(self._vocab_size, 1 if collective is None else collective.size)
        self._split: VocabularySplit | None = None
        if collective is not None:
            self._split = VocabularySplit(model.vocabulary.start, self._share, self._vocab_size, collective.gather)
        self._partial = partial_buffer(len(sampled), self._share, sampled.device)
        self._rows: dict[Sequence, int] = {}  # where `sampled` holds the last step's tokens
        self._is_cuda = sampled.device.type == "cuda"
        hosts = [torch.zeros(len(sampled), dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(_ON_THE_WAY)]
        self._hosts = itertools.cycle(hosts)
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._addresses: list[LayerAddresses] = []
        self._logits = torch.empty(0)  # of the last graph that ran
        self._followed: tuple[StepShape, Tensor | None] | None = None  # the step that a DeviceDraw follows
        self._max_rows = max_rows
        self._block_size = caches[0].shape[3]

    @torch.inference_mode()
    def measure_peak(self, max_model_len: int) -> int:
        """Bytes that the largest step takes beside weights and KV. The caches may be too small for the tokens."""
        self._run_largest(max_model_len)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._run_largest(max_model_len)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        return peak

    def _run_largest(self, max_model_len: int) -> None:
        """A step with as many tokens and as many samples as a step can have, and one with log-probabilities of as many
        prompt tokens."""
        num_tokens = min(max_model_len, max(1, len(self._sampled) // self._max_rows))
        self._run_prompts(min(self._max_rows, len(self._sampled) // num_tokens), num_tokens)
        self._run_prompts(1, min(max_model_len, len(self._sampled)), prompt_logprobs=0)

    def _run_prompts(self, count: int, num_tokens: int, prompt_logprobs: int | None = None) -> None:
        """Prompts of zeros, all of them in the first block of each cache."""
        blocks = [0] * -(-num_tokens // self._block_size)
        items = []
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=prompt_logprobs)
        for index in range(count):
            sequence = Sequence(f"prompt {index}", [0] * num_tokens, num_tokens, sampling)
            sequence.block_table = blocks
            items.append(ScheduledSequence(sequence, 0, num_tokens, sample=True))
        self.submit(Batch(items, []))
        self._rows = {}

    def attach(self, caches: Caches) -> None:
        """Replaces the caches, before `capture`."""
        assert self._graphs is None
        self._caches = caches

    @torch.inference_mode()
    def capture(self) -> None:
        """Records the CUDA graphs; before it, and on a CPU, every step is launched kernel by kernel."""
        if self._is_cuda:
            self._warm_up()
            shape = (min(self._max_rows, LARGEST_GRAPH), len(self._model.vocabulary))
            self._logits = torch.empty(shape, dtype=self._model.embeddings.dtype, device=self._sampled.device)
            self._graphs = DecodeGraphs(self._max_rows, self._clear, self._run_padded)
            self._draw_masked(self._buffer.decode_shape(1), self._logits, 1, self._masks.received(1))  # compiles
        if self._collective is None:  # because graphs of parts would break PeerSum's turns
            self._addresses = layer_addresses(self._model, self._caches)
            self._prompt_graphs = self._record_pieces()

    def _record_pieces(self) -> PromptGraphs:
        if not self._is_cuda:
            return PromptGraphs(self._model, len(self._sampled), without_graphs)
        with GraphRecorder() as recorder:
            return PromptGraphs(self._model, len(self._sampled), recorder.record)

    def close(self) -> None:
        """Frees the graphs; there is no step after it."""
        self._graphs = self._prompt_graphs = None
        if self._is_cuda:
            torch.cuda.synchronize()

    @torch.inference_mode()
    def submit(self, batch: Batch, layer_done: LayerDone | None = None) -> CudaStep:
        size = None
        if self._graphs is not None and self._buffer.is_decodes(batch):
            size = self._graphs.size_for(batch.num_tokens)
        if size is None:
            shape = self._buffer.shape(batch)
        else:
            shape = self._buffer.decode_shape(size, drafts=bool(batch.drafted))
        words = self._buffer.pack(batch, shape, self._rows)
        if self.tell is not None:
            self.tell(DeviceStep(shape, size, words.numpy().data.cast("B"), scored_rows(batch)))
        hidden, logits = self._execute(shape, size, words, layer_done, batch.moves())
        self._rows = rows_of(batch.items)
        scored = score(hidden, batch, self._whole_logits) if hidden is not None else []
        sampled = [item.sequence for item in batch.items for _ in range(item.num_samples)]
        return CudaStep(self, shape, logits, sampled, scored)

    @torch.inference_mode()
    def draw(self, shape: StepShape, logits: Tensor | None, sequences: list[Sequence]) -> dict[int, SampledToken]:
        """Samples the rows that the step's kernel could not. Returns the tokens that were drawn on the host."""
        rows = [
            (row, sequence)
            for row, sequence in enumerate(sequences)
            if not sequence.is_plain and sequence.status is not SequenceStatus.FINISHED
        ]
        if not rows:
            return {}
        masked = [(row, sequence) for row, sequence in rows if is_masked(sequence)]
        drawn = [(row, sequence) for row, sequence in rows if not is_masked(sequence)]
        if masked:
            self._masks.fill([row for row, _ in masked], [sequence for _, sequence in masked])
        drawn_rows = [row for row, _ in drawn]
        if self.tell is not None:
            self.tell(DeviceDraw(len(masked), drawn_rows))
        if masked:
            self._draw_masked(shape, logits, len(masked), self._masks.upload(len(masked)))
        return self._draw(logits, drawn_rows, [sequence for _, sequence in drawn]) if drawn else {}

    @torch.inference_mode()
    def follow(self, step: DeviceStep | DeviceDraw, layer_done: LayerDone | None, moves: Run[Move]) -> None:
        """Another rank's part of a step."""
        if isinstance(step, DeviceDraw):
            assert self._followed is not None, "rank 0 draws what a step has left"
            shape, logits = self._followed
            if step.num_masked:
                self._draw_masked(shape, logits, step.num_masked, self._masks.received(step.num_masked))
            if step.drawn_rows:
                self._draw(logits, step.drawn_rows, None)
            return
        hidden, logits = self._execute(step.shape, step.graph, self._buffer.take(step.words), layer_done, moves)
        self._followed = step.shape, logits
        if hidden is not None:
            for _ in logits_in_parts(hidden, step.scored_rows, self._whole_logits):
                pass

    def _execute(
        self,
        shape: StepShape,
        graph: int | None,
        words: Tensor,
        layer_done: LayerDone | None,
        moves: Run[Move] = (),
    ) -> tuple[Tensor | None, Tensor | None]:
        """Hidden states of all tokens, None of a graph; and the logits of `_run`."""
        self._buffer.upload(words)
        if graph is None or self._graphs is None:
            return self._run(self._buffer.view(shape), shape.tokens - shape.rows, layer_done, moves=moves)
        for move in moves:
            for layer in range(self.num_layers):
                move.before(layer)
        self._graphs.replay(graph, drafts=shape.drafts)
        if layer_done is not None:
            for layer in range(self.num_layers):
                layer_done(layer)
        return None, self._logits[:graph]

    def _warm_up(self) -> None:
        """Runs prompts of each power of 2, because loading a kernel at its first use stops the GPU. The prompts write
        to the first block of each cache. Invariant: no sequence reads a slot that it has not written."""
        num_tokens = 2 * self._block_size
        while num_tokens <= len(self._sampled):
            length = min(num_tokens, self._attentions[0].num_positions)
            self._run_prompts(min(self._max_rows, num_tokens // length), length)
            num_tokens *= 2
            torch.cuda.synchronize()  # because the buffers of the host take turns

    def _clear(self, rows: int) -> None:
        self._buffer.clear(self._buffer.decode_shape(rows))

    def _run_padded(self, rows: int, drafts: bool) -> None:
        self._run(self._buffer.view(self._buffer.decode_shape(rows, drafts=drafts)), 0, None, self._logits[:rows])

    def _run(
        self,
        inputs: StepInputs,
        num_prefill_tokens: int,
        layer_done: LayerDone | None,
        logits_out: Tensor | None = None,
        moves: Run[Move] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states of all tokens, and logits of the sampled rows, None when there are none; `sampled` gets their
        tokens."""
        graphs, num_tokens = self._prompt_graphs, len(inputs.token_ids)
        layers = [LayerAttention(attention, inputs) for attention in self._attentions]
        attend = StepAttention(layers, self._caches, num_prefill_tokens, layer_done, moves)
        if num_prefill_tokens and graphs is not None and graphs.has_room(num_tokens):
            mixed, whole = graphs.mixed(num_tokens), self._attentions[0].is_repeatable(inputs.shape)
            hidden = graphs.forward(inputs.token_ids, RepeatedAttention(attend, mixed, self._addresses, whole=whole))
        else:
            hidden = self._model.forward(inputs.token_ids, attend)
        if inputs.shape.samples == 0:
            return hidden, None
        # Without prompts every row is sampled, in order.
        rows = hidden.index_select(0, inputs.sample_rows) if num_prefill_tokens else hidden
        logits = self._model.logits(rows, logits_out)
        self._sample(logits, inputs)
        return hidden, logits

    def _draw_masked(self, shape: StepShape, logits: Tensor | None, count: int, words: Tensor) -> None:
        """Samples the rows that `words`, rank 0's, name. The inputs of the step are still on the device."""
        assert logits is not None, "every drawn row is sampled"
        if self._collective is not None:
            self._collective.broadcast(words)
        self._sample(logits, self._buffer.view(shape), self._masks.rows(count))

    def _sample(self, logits: Tensor, inputs: StepInputs, masked: MaskedRows | None = None) -> None:
        sample(
            logits,
            inputs.temperatures,
            inputs.seeds,
            inputs.output_positions,
            self._partial,
            self._sampled,
            self._split,
            masked,
        )

    def _whole_logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab]"""
        logits = self._model.logits(hidden)
        if self._collective is None:
            return logits
        return self._collective.gather_columns(logits, self._share, self._vocab_size)

    @torch.inference_mode()
    def read_back(self, count: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Where the tokens of the step's samples will be, and when."""
        host = next(self._hosts)[:count]
        if count:
            copy_words(self._sampled[:count], host)
        copied = None
        if self._is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return host, copied

    def _draw(
        self, logits: Tensor | None, rows: list[int], sequences: list[Sequence] | None
    ) -> dict[int, SampledToken]:
        """Draws the rows whose sampling the kernel does not know; the whole batch waits for the device. `sequences`
        None: rank 0 draws, and this rank receives the tokens."""
        assert logits is not None, "every drawn row is sampled"
        at = torch.tensor(rows, device=logits.device)
        chosen = logits[at]
        if self._collective is not None:
            chosen = self._collective.gather_columns(chosen, self._share, self._vocab_size)
        tokens = [] if sequences is None else self._sampler.sample(chosen, sequences)
        ids = torch.tensor([token.token_id for token in tokens] or rows, dtype=torch.int32, device=logits.device)
        if self._collective is not None:
            self._collective.broadcast(ids)
        self._sampled[at] = ids
        return dict(zip(rows, tokens, strict=False))
