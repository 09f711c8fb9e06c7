"""How decode attention cuts contexts into pieces and deals them out to programs: plain arithmetic on the host.

All programs that run at once get equal shares. With many sequences, each piece has its own program, and the
multiprocessors take the longest pieces first: the last ones to run are then few beside all others.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

# Fastest on an H200 (benchmarks/kernel_speed.py).
TILE = 64  # tokens that a program loads at once; pieces begin at multiples of it
# Rounds of all programs at once up to whose rows shares are equal: a few rows of a second round took half of one.
ROUNDS: Final = 3
_UNCUT = 4 / 3  # longest context that is not cut, in even shares of all contexts: merging would cost more time


@dataclass(frozen=True, slots=True)
class Pieces:
    """int32 arrays. Program p works on pieces [program_first[p], program_first[p + 1]); row r consists of
    `num_pieces[r]` pieces from `first_piece[r]` on."""

    program_first: np.ndarray  # [programs + 1]
    piece_row: np.ndarray  # [pieces]
    piece_start: np.ndarray  # [pieces], first token
    piece_end: np.ndarray  # [pieces]
    first_piece: np.ndarray  # [rows]
    num_pieces: np.ndarray  # [rows]

    @classmethod
    def of(cls, **arrays: np.ndarray) -> "Pieces":
        """Makes each array int32."""
        return cls(**{name: array.astype(np.int32) for name, array in arrays.items()})


def num_programs(rows: int, at_once: int) -> int:
    """Number of programs for `rows` rows on a device that runs `at_once` programs under each KV head."""
    return at_once if rows <= ROUNDS * at_once else rows + at_once


def plan_pieces(lengths: np.ndarray, rows: int, at_once: int, window: int = 0) -> Pieces:
    """Cuts contexts of `lengths` tokens, all positive, for a launch of `rows` rows: at most rows + at_once pieces. Only
    tiles in which the last `window` tokens lie are covered, if it is not 0."""
    if window:
        return in_window(lengths, window, lambda lengths: plan_pieces(lengths, rows, at_once))
    if rows <= ROUNDS * at_once:
        return equal_shares(lengths, at_once)
    return longest_first(lengths, max(1, int(at_once / _UNCUT)), num_programs(rows, at_once))


def in_window(lengths: np.ndarray, window: int, cut: Callable[[np.ndarray], Pieces]) -> Pieces:
    """Cuts the ends of contexts, from the tile on in which the last `window` tokens begin."""
    before = np.maximum(lengths - window, 0) // TILE * TILE
    pieces = cut(lengths - before)
    shift = before[pieces.piece_row].astype(np.int32)
    return dataclasses.replace(pieces, piece_start=pieces.piece_start + shift, piece_end=pieces.piece_end + shift)


def equal_shares(lengths: np.ndarray, programs: int) -> Pieces:
    """Gives each program the same number of tiles: fewer than len(lengths) + programs pieces."""
    tiles = -(-lengths // TILE)
    row_first = np.cumsum(tiles) - tiles
    total = int(tiles.sum())
    share = -(-total // programs)
    begin = np.union1d(row_first, np.arange(0, total, share))
    stop = np.append(begin[1:], total)
    row = np.searchsorted(row_first, begin, side="right") - 1
    count = np.bincount(row, minlength=len(lengths))
    return Pieces.of(
        program_first=np.searchsorted(begin, np.arange(programs + 1) * share),
        piece_row=row,
        piece_start=(begin - row_first[row]) * TILE,
        piece_end=np.minimum((stop - row_first[row]) * TILE, lengths[row]),
        first_piece=np.cumsum(count) - count,
        num_pieces=count,
    )


def longest_first(lengths: np.ndarray, extra: int, programs: int) -> Pieces:
    """Gives each piece its own program, and cuts only contexts far longer than the others: at most len(lengths) + extra
    pieces."""
    size = max(1, -(-int(lengths.sum()) // extra))
    count = -(-lengths // size)
    size = -(-lengths // count)
    size = -(-size // TILE) * TILE
    count = -(-lengths // size)
    order = np.argsort(-np.minimum(size, lengths), kind="stable")
    first = np.empty_like(count)
    first[order] = np.cumsum(count[order]) - count[order]
    row = np.repeat(order, count[order])
    start = (np.arange(len(row)) - first[row]) * size[row]
    return Pieces.of(
        program_first=np.minimum(np.arange(programs + 1), len(row)),
        piece_row=row,
        piece_start=start,
        piece_end=np.minimum(start + size[row], lengths[row]),
        first_piece=first,
        num_pieces=count,
    )
