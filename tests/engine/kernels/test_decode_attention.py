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
    extra: int = 0,
    padding: int = 2,
) -> None:
    paged = PagedCache(lengths, kv_heads, block_size, head_dim, dtype)
    rows = len(lengths) + padding
    pieces = plan_pieces(np.array(lengths), extra)
    grid = np.full(rows + extra, -1, dtype=np.int32)
    grid[: len(pieces.row)] = pieces.row
    tables, starts = paged.flat_tables()

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(DEVICE)

    plan = DecodePlan(
        tensor(grid),
        tensor(pieces.start),
        tensor(pieces.end),
        tensor(pieces.first),
        tensor(pieces.count),
        starts,
        tables,
    )
    scratch = DecodeScratch.allocate(rows, extra, heads, kv_heads, head_dim, DEVICE)
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
@pytest.mark.parametrize("extra", [0, 6])
def test_block_sizes_with_and_without_splits(dtype: torch.dtype, block_size: int, extra: int) -> None:
    check([1, 63, 64, 65, 200], block_size=block_size, dtype=dtype, extra=extra)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (16, 8), (9, 3), (8, 1), (20, 1)])
def test_head_shapes(head_dim: int, heads: int, kv_heads: int) -> None:
    check([130, 17], heads=heads, kv_heads=kv_heads, head_dim=head_dim, extra=3)


def test_one_long_context_is_spread_over_the_grid() -> None:
    check([2500, 5], extra=40, heads=2, kv_heads=1, block_size=32)


@pytest.mark.parametrize("extra", [0, 1, 7, 49])
def test_pieces_cover_every_context_once_and_fit_the_grid(extra: int) -> None:
    random_lengths = np.random.default_rng(extra)
    for _ in range(50):
        lengths = random_lengths.integers(1, 3000, random_lengths.integers(1, 20))
        lengths[0] = random_lengths.choice([1, 64, 131072])
        pieces = plan_pieces(lengths, extra)
        assert len(pieces.row) <= len(lengths) + extra
        for row, length in enumerate(lengths):
            own = slice(pieces.first[row], pieces.first[row] + pieces.count[row])
            assert set(pieces.row[own]) == {row}
            assert pieces.start[own].tolist() == [0, *pieces.end[own][:-1]]
            assert pieces.end[own][-1] == length
            assert not (pieces.start[own] % TILE).any()
