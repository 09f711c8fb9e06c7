import itertools

import numpy as np
import pytest
import torch

from engine.kernels.decode_attention import (
    TILE,
    DecodePlan,
    DecodeScratch,
    decode_attention,
    decode_attention_reference,
    plan_pieces,
)
from tests.engine.kernels.device import DEVICE, DTYPES, TOLERANCE, random, relative_error
from tests.engine.kernels.paged import PagedCache


def check(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    programs: int = 1,
    padding: int = 2,
) -> None:
    paged = PagedCache(lengths, kv_heads, block_size, head_dim, dtype)
    rows = len(lengths) + padding
    pieces = plan_pieces(np.array(lengths), programs)
    tables, starts = paged.flat_tables()

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(DEVICE)

    plan = DecodePlan(
        tensor(pieces.program_first),
        tensor(pieces.row),
        tensor(pieces.start),
        tensor(pieces.end),
        tensor(pieces.first),
        tensor(pieces.count),
        starts,
        tables,
    )
    scratch = DecodeScratch.allocate(rows, programs, heads, kv_heads, head_dim, DEVICE)
    scratch.mixed.fill_(float("nan"))
    scratch.log_sums.fill_(float("nan"))
    # Rows further apart than they are long, as in a fused projection.
    queries = random(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
    for _ in range(2):  # the counters are back at zero after each launch
        found = decode_attention(queries, paged.cache, plan, scratch)[: len(lengths)]
        expected = decode_attention_reference(queries[: len(lengths)], paged.cache, lengths, paged.tables)
        assert relative_error(found, expected) < TOLERANCE[dtype]
        assert not scratch.arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("programs", [1, 3, 20])
def test_block_sizes_with_and_without_splits(dtype: torch.dtype, block_size: int, programs: int) -> None:
    check([1, 63, 64, 65, 200], block_size=block_size, dtype=dtype, programs=programs)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (16, 8), (9, 3), (8, 1), (20, 1)])
def test_head_shapes(head_dim: int, heads: int, kv_heads: int) -> None:
    check([130, 17], heads=heads, kv_heads=kv_heads, head_dim=head_dim, programs=3)


def test_one_long_context_is_spread_over_the_grid() -> None:
    check([2500, 5], programs=40, heads=2, kv_heads=1, block_size=32)


@pytest.mark.parametrize("programs", [1, 7, 33])
def test_pieces_cover_every_context_once_in_equal_shares(programs: int) -> None:
    random_lengths = np.random.default_rng(programs)
    for _ in range(50):
        lengths = random_lengths.integers(1, 3000, random_lengths.integers(1, 20))
        lengths[0] = random_lengths.choice([1, 64, 131072])
        pieces = plan_pieces(lengths, programs)
        assert len(pieces.row) < len(lengths) + programs
        assert len(pieces.program_first) == programs + 1
        assert (pieces.program_first[0], pieces.program_first[-1]) == (0, len(pieces.row))
        tiles = -(-(pieces.end - pieces.start) // TILE)
        shares = [tiles[first:stop].sum() for first, stop in itertools.pairwise(pieces.program_first)]
        assert max(shares) == -(-tiles.sum() // programs)
        for row, length in enumerate(lengths):
            own = slice(pieces.first[row], pieces.first[row] + pieces.count[row])
            assert set(pieces.row[own]) == {row}
            assert pieces.start[own].tolist() == [0, *pieces.end[own][:-1]]
            assert pieces.end[own][-1] == length
            assert not (pieces.start[own] % TILE).any()
