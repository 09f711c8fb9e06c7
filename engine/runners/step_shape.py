"""The sizes of a step's parts, which decide where each index lies in the buffer that goes to the GPU.

Because ranks send these sizes to each other (engine/ranks/rank_commands.py), also without GPU and Triton, this file
imports neither.
"""

from dataclasses import dataclass

import msgspec

from engine.model.attention import Span

WINDOW = "window_"  # prefix of fields of layers with a window


@dataclass(frozen=True, slots=True)
class StepShape:
    """Counts, padding included."""

    tokens: int
    rows: int  # decodes
    programs: int  # of decode attention, under each KV head
    pieces: int  # at most, of the decodes' contexts
    chunks: int  # prompt chunks
    tiles: int  # of their queries
    samples: int
    pages: int = 0  # columns of the chunks' page table, where the backend wants one
    longest_chunk: int = 0  # tokens
    has_windows: bool = False  # layers with a window have fields of their own
    drafts: bool = False  # a row may see those before it, so all are stored before the first attends

    def fields(self) -> dict[str, tuple[int, int]]:
        """Name -> (words, filling of the padding), in order. The block tables follow."""
        return {
            "token_ids": (self.tokens, 0),
            "positions": (self.tokens, 0),
            "slots": (self.tokens, -1),
            "sample_rows": (self.samples, 0),
            "temperatures": (self.samples, 0),
            "output_positions": (self.samples, 0),
            "seeds": (2 * self.samples, 0),
            **self._piece_fields(""),
            "decode_table": (self.rows, 0),
            "prefill_table": (self.chunks, 0),
            **(self._window_fields() if self.has_windows else {}),
            "tile_chunk": (self.tiles, 0),
            "tile_start": (self.tiles, 0),
            "query_start": (self.chunks + 1 if self.chunks else 0, 0),
            "context": (self.chunks, 0),
            "length": (self.chunks, 0),
            "end": (self.chunks, 0),
            "page_table": (self.chunks * self.pages, 0),
        }

    def _window_fields(self) -> dict[str, tuple[int, int]]:
        return {
            **self._piece_fields(WINDOW),
            f"{WINDOW}slots": (self.tokens, -1),
            f"{WINDOW}decode_table": (self.rows, 0),
            f"{WINDOW}prefill_table": (self.chunks, 0),
        }

    def _piece_fields(self, prefix: str) -> dict[str, tuple[int, int]]:
        return {
            f"{prefix}program_first": (self.programs + 1 if self.rows else 0, 0),
            f"{prefix}piece_row": (self.pieces, 0),
            f"{prefix}piece_start": (self.pieces, 0),
            f"{prefix}piece_end": (self.pieces, 0),
            f"{prefix}first_piece": (self.rows, 0),
            f"{prefix}num_pieces": (self.rows, 0),
        }


class TorchStep(msgspec.Struct, frozen=True, tag="torch_step", array_like=True):
    """A step of ModelRunner."""

    token_ids: list[int]
    prefill: list[Span]
    decode: list[Span]
    sample_rows: list[int]
    scored_rows: list[tuple[int, int]] = []  # see engine/runners/prompt_scores.py


class DeviceStep(msgspec.Struct, frozen=True, tag="device_step", array_like=True):
    """A step of CudaRunner, as StepBuffer packed it."""

    shape: StepShape
    graph: int | None  # rows of the graph that is replayed; None: the step is launched kernel by kernel
    words: memoryview  # int32
    scored_rows: list[tuple[int, int]] = []  # see engine/runners/prompt_scores.py


class DeviceDraw(msgspec.Struct, frozen=True, tag="device_draw", array_like=True):
    """What follows a DeviceStep some of whose samples depend on the tokens of the step before."""

    num_masked: int  # samples that a mask of rank 0 constrains
    drawn_rows: list[int]  # samples that rank 0 draws on the host
