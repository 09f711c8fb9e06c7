"""A step as the GPU sees it: all indices of a batch in one int32 buffer, which one small kernel transfers.

The `StepShape` alone decides where the buffer's fields lie: a CUDA graph is captured for one shape, and every step that
replays the graph fills the same places, with padding. Host buffers take turns, because a step may still read the last.
"""

import functools
import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence as Run
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor

from engine.kernels.attention.decode_attention import DecodePlan
from engine.kernels.attention.decode_pieces import num_programs, plan_pieces
from engine.kernels.attention.prefill_attention import PrefillPlan, plan_tiles
from engine.kernels.copy_words import copy_words
from engine.runners.step_shape import WINDOW, StepShape
from engine.sequences.batch import Batch, ScheduledSequence
from engine.sequences.sequence import PENDING, Sequence
from runtime.config.step_times import token_pairs

_ALIGNMENT = 32  # words; kernels are compiled for pointers that are aligned to 16 bytes
_HOST_BUFFERS = 3
_SAMPLE_STEP = 8
# Tokens that a step's drafts may see, one row after the other, as decodes. As chunks, whose launches are no single
# graph, they read what they see once.
_SEEN_AS_ROWS = 1 << 16
# Fields of the buffer that DecodePlan and PrefillPlan have, too.
_PIECE_FIELDS = ("program_first", "piece_row", "piece_start", "piece_end", "first_piece", "num_pieces")
_CHUNK_FIELDS = ("tile_chunk", "tile_start", "query_start", "context", "length")


@dataclass(frozen=True, slots=True)
class _Layout:
    places: dict[str, slice]  # words of the buffer
    padding: np.ndarray  # int32, all fields filled with padding
    tables: int  # where the block tables begin


@functools.lru_cache(maxsize=64)
def _layout(shape: StepShape) -> _Layout:
    places, parts, at = {}, [], 0
    for name, (words, padding) in shape.fields().items():
        places[name] = slice(at, at + words)
        parts.append(np.full(aligned(words), padding, dtype=np.int32))
        at += aligned(words)
    return _Layout(places, np.concatenate(parts), at)


def aligned(words: int) -> int:
    """Rounds up."""
    return -(-words // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Where layers that are alike store and read."""

    slots: Tensor  # [tokens]; negative: stored nowhere
    decode: DecodePlan
    prefill: PrefillPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of the device's buffer: the metadata of `TritonAttention` and `FlashAttention`."""

    shape: StepShape
    token_ids: Tensor  # [tokens]; negative: see engine.kernels.embedding
    positions: Tensor  # [tokens]
    sample_rows: Tensor  # [samples]
    temperatures: Tensor  # [samples] float32
    output_positions: Tensor  # [samples]
    seeds: Tensor  # [samples, 2]
    whole: LayerInputs  # of layers that see all
    window: LayerInputs | None  # of layers with a window, where there are some
    chunk_ends: Tensor  # [chunks], number of tokens that a chunk's last query sees
    cumulative_lengths: Tensor  # [chunks + 1]
    page_table: Tensor  # [chunks, pages]
    longest_chunk: int


class StepBuffer:
    def __init__(
        self,
        *,
        max_tokens: int,
        max_rows: int,
        table_words: int,
        block_size: int,
        programs_at_once: int,
        query_tile: int,
        table_from: float,
        window: int,
        device: torch.device,
    ) -> None:
        """max_rows: decodes, and tokens of drafts that are computed as such. table_words: room for the block tables of
        one step, of all sequences together. table_from: as in `TritonAttention`. window: of the layers that have one;
        0: none has."""
        self._window = window
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._block_size = block_size
        self._programs_at_once = programs_at_once
        self._query_tile = query_tile
        self._table_from = table_from
        tables = 1 + (table_from < inf) + (window > 0)
        words = 28 * (max_tokens + programs_at_once + 32 * _ALIGNMENT) + table_words * tables
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        hosts = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(_HOST_BUFFERS)]
        self._hosts = itertools.cycle([(host, host.numpy()) for host in hosts])

    def shape(self, batch: Batch) -> StepShape:
        """The batch's shape, without padding but for samples."""
        if batch.drafted and self.is_decodes(batch):
            return self.decode_shape(batch.num_tokens, drafts=True)
        lengths = np.array([item.num_tokens for item in batch.chunks], dtype=np.int64)
        rows, chunks = len(batch.decode), len(batch.chunks)
        pairs = sum(token_pairs(item.start, item.num_tokens) for item in batch.chunks)
        pages = max(self._num_blocks(item) for item in batch.chunks) if pairs >= self._table_from else 0
        return StepShape(
            tokens=batch.num_tokens,
            rows=rows,
            programs=num_programs(rows, self._programs_at_once) if rows else 0,
            pieces=rows + self._programs_at_once if rows else 0,
            chunks=chunks,
            tiles=int((-(-lengths // self._query_tile)).sum()),
            samples=self._padded_samples(sum(item.num_samples for item in batch.items)),
            pages=pages,
            longest_chunk=int(lengths.max()) if chunks else 0,
            has_windows=self._window > 0,
        )

    def is_decodes(self, batch: Batch) -> bool:
        """Whether each token of the batch is a row, as decodes are: drafts that have no prompt beside them, too."""
        if not batch.drafted:
            return not batch.prefill
        seen = sum(item.num_tokens * item.end for item in batch.drafted)
        return not batch.prefill and batch.num_tokens <= self._max_rows and seen <= _SEEN_AS_ROWS

    def _padded_samples(self, samples: int) -> int:
        """Rounds up to a size of the graphs, because cuBLAS loads a kernel at the first use of a size, and all wait."""
        return min(-(-samples // _SAMPLE_STEP) * _SAMPLE_STEP, self._max_tokens)

    def decode_shape(self, rows: int, *, drafts: bool = False) -> StepShape:
        """The shape of a graph for that many decodes, or tokens of drafts."""
        at_once = self._programs_at_once
        programs = num_programs(rows, at_once)
        has_windows = self._window > 0
        return StepShape(rows, rows, programs, rows + at_once, 0, 0, rows, has_windows=has_windows, drafts=drafts)

    def view(self, shape: StepShape) -> StepInputs:
        layout = _layout(shape)

        def at(name: str) -> Tensor:
            return self._device[layout.places[name]]

        flat = self._device[layout.tables :]
        chunks = {name: at(name) for name in _CHUNK_FIELDS}

        def layers(prefix: str) -> LayerInputs:
            pieces = {name: at(prefix + name) for name in _PIECE_FIELDS}
            return LayerInputs(
                at(f"{prefix}slots"),
                DecodePlan(**pieces, table_start=at(f"{prefix}decode_table"), tables=flat),
                PrefillPlan(**chunks, table_start=at(f"{prefix}prefill_table"), tables=flat),
            )

        return StepInputs(
            shape=shape,
            token_ids=at("token_ids"),
            positions=at("positions"),
            sample_rows=at("sample_rows"),
            temperatures=at("temperatures").view(torch.float32),
            output_positions=at("output_positions"),
            seeds=at("seeds").view(-1, 2),
            whole=layers(""),
            window=layers(WINDOW) if shape.has_windows else None,
            chunk_ends=at("end"),
            cumulative_lengths=at("query_start"),
            page_table=at("page_table").view(shape.chunks, shape.pages),
            longest_chunk=shape.longest_chunk,
        )

    def clear(self, shape: StepShape) -> None:
        """Fills the fields of `view(shape)` with padding. Waits for the copy."""
        layout = _layout(shape)
        self._device[: layout.tables].copy_(torch.from_numpy(layout.padding))

    def upload(self, words: Tensor) -> None:
        """Copies the result of `pack` or `take` to the device, in stream order, where `view` sees it."""
        copy_words(words, self._device[: len(words)])

    def take(self, words: memoryview) -> Tensor:
        """A host buffer with the words that `pack` returned on rank 0."""
        host, own = next(self._hosts)
        packed = np.frombuffer(words, dtype=np.int32)
        own[: len(packed)] = packed
        return host[: len(packed)]

    def pack(self, batch: Batch, shape: StepShape, sampled_rows: Mapping[Sequence, int]) -> Tensor:
        """The batch's indices as int32 words of a host buffer.

        sampled_rows: places in `sampled` of the tokens that are `PENDING`, from the step before.
        """
        host, words = next(self._hosts)
        layout = _layout(shape)
        tables_at = layout.tables
        words[:tables_at] = layout.padding

        def put(name: str, values: np.ndarray) -> None:
            begin = layout.places[name].start
            words[begin : begin + len(values)] = values

        items = batch.items
        counts = np.array([item.num_tokens for item in items], dtype=np.int64)
        starts = np.array([item.start for item in items], dtype=np.int64)
        begins = np.cumsum(counts) - counts
        flat = array("i")
        first_blocks = _append(flat, [item.sequence.block_table for item in items])
        firsts = {"": first_blocks}
        if shape.has_windows:
            has_own = bool(items[0].sequence.window_table)
            firsts[WINDOW] = _append(flat, [one.sequence.window_table for one in items]) if has_own else first_blocks
        tables = np.frombuffer(flat, dtype=np.int32)
        assert tables_at + len(tables) <= len(words), "the buffer has room for every block table"

        positions = np.arange(batch.num_tokens) + np.repeat(starts - begins, counts)
        put("token_ids", self._token_ids(batch, sampled_rows))
        put("positions", positions)
        self._put_samples(put, items, begins + counts)
        num_chunks = len(batch.chunks) if shape.chunks else 0
        lengths = counts[:num_chunks]
        row = lengths.sum()  # the first that is a decode
        for prefix, first in firsts.items():
            table_of = np.repeat(first, counts)  # of each token
            blocks = tables[table_of + positions // self._block_size].astype(np.int64)
            put(prefix + "slots", blocks * self._block_size + positions % self._block_size)
            put(prefix + "prefill_table", first[:num_chunks])
            if shape.rows:
                window = self._window if prefix else 0
                pieces = plan_pieces(positions[row:] + 1, shape.rows, self._programs_at_once, window)
                for name in _PIECE_FIELDS:
                    put(prefix + name, getattr(pieces, name))
                put(prefix + "decode_table", table_of[row:])
        if num_chunks:
            tile_chunk, tile_start = plan_tiles(lengths, self._query_tile)
            put("tile_chunk", tile_chunk)
            put("tile_start", tile_start)
            put("query_start", np.append(begins[:num_chunks], row))
            put("context", starts[:num_chunks])
            put("length", lengths)
            put("end", starts[:num_chunks] + lengths)
            put("page_table", self._pages(batch, shape, tables, first_blocks))
        words[tables_at : tables_at + len(tables)] = tables
        return host[: tables_at + len(tables)]

    def _pages(self, batch: Batch, shape: StepShape, tables: np.ndarray, firsts: np.ndarray) -> np.ndarray:
        """The chunks' page table, row by row; empty where the backend wants none. firsts: where each chunk's block
        table begins."""
        pages = np.zeros((shape.chunks, shape.pages), dtype=np.int32)
        if shape.pages:
            for row, item, first in zip(pages, batch.chunks, firsts, strict=False):
                used = self._num_blocks(item)
                row[:used] = tables[first : first + used]
        return pages.ravel()

    def _put_samples(
        self, put: Callable[[str, np.ndarray], None], items: list[ScheduledSequence], ends: np.ndarray
    ) -> None:
        """ends: of the items' rows."""
        counts = np.array([item.num_samples for item in items], dtype=np.int64)
        num_samples = int(counts.sum())
        if not num_samples:
            return
        back = np.arange(num_samples) - np.repeat(np.cumsum(counts), counts)  # from an item's end to a sampled row
        sequences = [item.sequence for item in items for _ in range(item.num_samples)]
        put("sample_rows", np.repeat(ends, counts) + back)
        params = [sequence.sampling for sequence in sequences]
        temperatures = [0.0 if p.is_greedy else p.temperature for p in params]
        put("temperatures", np.array(temperatures, dtype=np.float32).view(np.int32))
        put("output_positions", np.array([sequence.num_output_tokens for sequence in sequences]) + back + 1)
        put("seeds", np.array([p.seed for p in params], dtype="<i8").view(np.int32))

    def _token_ids(self, batch: Batch, sampled_rows: Mapping[Sequence, int]) -> np.ndarray:
        chunks = [item.sequence.token_ids[item.start : item.end] for item in batch.chunks]
        ids = list(itertools.chain.from_iterable(chunks))
        assert PENDING not in ids[-1:], "all tokens of a prompt are known"
        for item in batch.decode:
            token = item.sequence.token_ids[item.start]
            ids.append(-1 - sampled_rows[item.sequence] if token == PENDING else token)
        return np.array(ids, dtype=np.int64)

    def _num_blocks(self, item: ScheduledSequence) -> int:
        return -(-item.end // self._block_size)


def _append(flat: "array[int]", tables: Run[list[int]]) -> np.ndarray:
    """Returns where each begins."""
    starts = []
    for table in tables:
        starts.append(len(flat))
        flat.fromlist(table)
    return np.array(starts, dtype=np.int64)


def rows_of(items: Run[ScheduledSequence]) -> dict[Sequence, int]:
    """Places in `sampled` of a step's tokens; of a draft's, the last."""
    ends = itertools.accumulate(item.num_samples for item in items)
    return {item.sequence: end - 1 for item, end in zip(items, ends, strict=True) if item.sample}
