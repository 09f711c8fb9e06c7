import itertools
from dataclasses import asdict

import numpy as np
import pytest
import torch

from engine.kernels.attention.decode_attention import DecodePlan, DecodeScratch, decode_attention
from engine.kernels.attention.decode_pieces import (
    ROUNDS,
    TILE,
    Pieces,
    equal_shares,
    in_window,
    longest_first,
    num_programs,
    plan_pieces,
)
from engine.kernels.attention.rotate_store import Rotation
from engine.kernels.attention.scores import PLAIN, Scores
from tests.engine.kernels.device import DEVICE, DTYPES, TOLERANCE, edged, random, relative_error
from tests.engine.kernels.paged import PagedCache
from tests.engine.kernels.references import decode_attention_reference, rotate_store_reference

pytestmark = pytest.mark.slow


def pieces_of(lengths: np.ndarray, programs: int, *, one_each: bool, window: int) -> Pieces:
    def cut(lengths: np.ndarray) -> Pieces:
        return longest_first(lengths, 2, programs) if one_each else equal_shares(lengths, programs)

    return in_window(lengths, window, cut) if window else cut(lengths)


def make_plan(
    paged: PagedCache,
    lengths: list[int],
    programs: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    padding: int,
    one_each: bool = False,
    window: int = 0,
) -> tuple[DecodePlan, DecodeScratch]:
    rows = len(lengths) + padding
    pieces = pieces_of(np.array(lengths), programs, one_each=one_each, window=window)
    tables, starts = paged.flat_tables()

    columns = {name: torch.from_numpy(array).to(DEVICE) for name, array in asdict(pieces).items()}
    plan = DecodePlan(**columns, table_start=starts, tables=tables)
    scratch = DecodeScratch.allocate(rows, programs, heads, kv_heads, head_dim, DEVICE)
    scratch.mixed.fill_(float("nan"))
    scratch.log_sums.fill_(float("nan"))
    return plan, scratch


def check(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    programs: int = 1,
    padding: int = 2,
    one_each: bool = False,
    rules: Scores = PLAIN,
) -> None:
    """kv_dtype: `dtype` if None. Rows of padding and pieces that nobody has stay as they are."""
    paged = PagedCache(lengths, kv_heads, block_size, head_dim, kv_dtype or dtype)
    rows = len(lengths) + padding
    plan, scratch = make_plan(paged, lengths, programs, heads, kv_heads, head_dim, padding, one_each, rules.window)
    # Rows further apart than they are long, as in a fused projection.
    queries = random(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
    out = torch.full((rows, heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    for _ in range(2):  # the counters are back at zero after each launch
        found = decode_attention(queries, paged.cache, plan, scratch, out=out, scores=rules)[: len(lengths)]
        expected = decode_attention_reference(queries[: len(lengths)], paged.cache, lengths, paged.tables, rules)
        assert relative_error(found, expected) < TOLERANCE[dtype]
        assert out[len(lengths) :].isnan().all()
        assert scratch.mixed[len(plan.piece_row) :].isnan().all()
        assert not scratch.arrived.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("programs", [1, 3, 20])
def test_block_sizes_with_and_without_splits(dtype: torch.dtype, block_size: int, programs: int) -> None:
    check([1, 63, 64, 65, 200], block_size=block_size, dtype=dtype, programs=programs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_program_for_each_piece(dtype: torch.dtype, block_size: int) -> None:
    check([1, 300, 64, 65, 200], block_size=block_size, dtype=dtype, programs=9, one_each=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 64, 100])
@pytest.mark.parametrize(("programs", "one_each"), [(1, False), (7, False), (9, True)])
def test_windows(dtype: torch.dtype, window: int, programs: int, one_each: bool) -> None:
    rules = Scores(window=window)
    check([1, 300, 64, 65, 200], dtype=dtype, programs=programs, one_each=one_each, rules=rules)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("programs", [1, 7])
def test_soft_caps_and_sinks(dtype: torch.dtype, window: int, programs: int) -> None:
    sinks = random(4, dtype=dtype, scale=2)
    for rules in (Scores(window, softcap=1.5), Scores(window, sinks=sinks), Scores(window, 1.5, sinks)):
        check([1, 300, 65], dtype=dtype, programs=programs, rules=rules)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (16, 8, 128)])
def test_new_tokens_are_rotated_and_stored_on_the_way(
    dtype: torch.dtype, norms: bool, heads: int, kv_heads: int, head_dim: int
) -> None:
    check_rotation(dtype, heads, kv_heads, head_dim, norms=norms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_tokens_of_layers_with_a_window_of_which_a_part_is_rotated(dtype: torch.dtype) -> None:
    check_rotation(dtype, 9, 3, 64, rotary=48, scaled=True, rules=Scores(window=70, sinks=random(9)))


def check_rotation(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    norms: bool = False,
    rotary: int | None = None,
    scaled: bool = False,
    rules: Scores = PLAIN,
) -> None:
    lengths, block_size = [1, 64, 65, 200], 16
    paged = PagedCache(lengths, kv_heads, block_size, head_dim, dtype)
    plan, scratch = make_plan(paged, lengths, 5, heads, kv_heads, head_dim, padding=1, window=rules.window)
    rows = len(lengths) + 1
    newest = [paged.tables[row][(length - 1) // block_size] for row, length in enumerate(lengths)]
    slots = [block * block_size + (length - 1) % block_size for block, length in zip(newest, lengths, strict=True)]
    for slot in slots:
        paged.cache[slot // block_size, :, :, slot % block_size] = float("nan")
    angles = random(200, (rotary or head_dim) // 2, scale=5)
    rotation = Rotation(
        slots=torch.tensor([*slots, -1], dtype=torch.int32, device=DEVICE),
        positions=torch.tensor([*(length - 1 for length in lengths), 0], dtype=torch.int32, device=DEVICE),
        table=torch.cat((angles.cos(), angles.sin()), dim=-1),
        query_norm=edged(random(head_dim, dtype=dtype)) if norms else None,
        key_norm=edged(random(head_dim, dtype=dtype)) if norms else None,
        eps=1e-6,
        query_scales=random(200) if scaled else None,
    )
    qkv = random(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    expected_cache = paged.cache.clone()
    queries = rotate_store_reference(qkv, expected_cache, rotation)[: len(lengths)]
    expected = decode_attention_reference(queries, expected_cache, lengths, paged.tables, rules)
    found = decode_attention(qkv, paged.cache, plan, scratch, rotation, scores=rules)[: len(lengths)]
    assert relative_error(found, expected) < TOLERANCE[dtype]
    assert torch.equal(paged.cache.isnan(), expected_cache.isnan())
    written = ~expected_cache.isnan()
    assert relative_error(paged.cache[written], expected_cache[written]) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 2, 16), (16, 8, 128), (9, 3, 64), (8, 1, 128), (20, 1, 64), (9, 3, 16), (2, 1, 256)],
)
def test_head_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    check([130, 17], heads=heads, kv_heads=kv_heads, head_dim=head_dim, programs=3)


def test_one_long_context_is_spread_over_the_grid() -> None:
    check([2500, 5], programs=40, heads=2, kv_heads=1, block_size=32)


@pytest.mark.parametrize("programs", [1, 7, 33])
def test_pieces_cover_every_context_once_in_equal_shares(programs: int) -> None:
    random_lengths = np.random.default_rng(programs)
    for _ in range(50):
        lengths = random_lengths.integers(1, 3000, random_lengths.integers(1, 20))
        lengths[0] = random_lengths.choice([1, 64, 131072])
        pieces = equal_shares(lengths, programs)
        assert len(pieces.piece_row) < len(lengths) + programs
        assert len(pieces.program_first) == programs + 1
        assert (pieces.program_first[0], pieces.program_first[-1]) == (0, len(pieces.piece_row))
        tiles = -(-(pieces.piece_end - pieces.piece_start) // TILE)
        shares = [tiles[first:stop].sum() for first, stop in itertools.pairwise(pieces.program_first)]
        assert max(shares) == -(-tiles.sum() // programs)
        for row, length in enumerate(lengths):
            own = slice(pieces.first_piece[row], pieces.first_piece[row] + pieces.num_pieces[row])
            assert set(pieces.piece_row[own]) == {row}
            assert pieces.piece_start[own].tolist() == [0, *pieces.piece_end[own][:-1]]
            assert pieces.piece_end[own][-1] == length
            assert not (pieces.piece_start[own] % TILE).any()


@pytest.mark.parametrize("at_once", [1, 7, 66])
def test_pieces_of_many_come_longest_first_each_with_its_program(at_once: int) -> None:
    random_lengths = np.random.default_rng(at_once)
    for _ in range(30):
        rows = int(random_lengths.integers(ROUNDS * at_once + 1, ROUNDS * at_once + 200))
        lengths = random_lengths.integers(1, 3000, rows - 3)  # three rows of padding
        pieces = plan_pieces(lengths, rows, at_once)
        assert len(pieces.program_first) == num_programs(rows, at_once) + 1
        assert len(pieces.piece_row) <= rows + at_once
        assert (np.diff(pieces.program_first)[: len(pieces.piece_row)] == 1).all()
        assert pieces.program_first[-1] == len(pieces.piece_row)
        assert sorted(set(pieces.piece_row)) == list(range(len(lengths)))
        sizes = pieces.piece_end - pieces.piece_start
        firsts = [sizes[first] for first in sorted(pieces.first_piece)]
        assert firsts == sorted(firsts, reverse=True)
        assert np.bincount(pieces.piece_row, weights=sizes).astype(int).tolist() == lengths.tolist()
        assert np.bincount(pieces.piece_row).tolist() == pieces.num_pieces.tolist()
