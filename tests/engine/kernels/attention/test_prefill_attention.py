import numpy as np
import pytest
import torch

from engine.kernels.attention.prefill_attention import PrefillPlan, plan_tiles, prefill_attention, query_tile
from engine.kernels.attention.scores import PLAIN, Scores
from tests.engine.kernels.device import DEVICE, DTYPES, TOLERANCE, random, relative_error
from tests.engine.kernels.paged import PagedCache
from tests.engine.kernels.references import prefill_attention_reference


def check(
    chunks: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    rules: Scores = PLAIN,
) -> None:
    """chunks: (tokens before, tokens of the chunk). kv_dtype: `dtype` if None."""
    contexts, lengths = [context for context, _ in chunks], [length for _, length in chunks]
    paged = PagedCache(
        [context + length for context, length in chunks], kv_heads, block_size, head_dim, kv_dtype or dtype
    )
    tables, starts = paged.flat_tables()
    tile_chunk, tile_start = plan_tiles(np.array(lengths), query_tile(dtype))

    def tensor(values: list[int] | np.ndarray) -> torch.Tensor:
        return torch.tensor(np.array(values), dtype=torch.int32, device=DEVICE)

    query_start = np.cumsum(lengths) - np.array(lengths)
    plan = PrefillPlan(
        tensor(tile_chunk), tensor(tile_start), tensor(query_start), tensor(contexts), tensor(lengths), starts, tables
    )
    queries = random(sum(lengths), heads + 2 * kv_heads, head_dim, dtype=dtype)[:, :heads]
    out = torch.full((sum(lengths) + 1, heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    found = prefill_attention(queries, paged.cache, plan, out, rules)[:-1]
    expected = prefill_attention_reference(queries, paged.cache, contexts, lengths, paged.tables, rules)
    assert relative_error(found, expected) < TOLERANCE[dtype]
    assert out[-1].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_chunks_of_several_sequences_at_any_offset(dtype: torch.dtype, block_size: int) -> None:
    check([(0, 1), (0, 130), (77, 40), (128, 3), (63, 65)], block_size=block_size, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 20, 64, 100])
def test_windows(dtype: torch.dtype, window: int) -> None:
    check([(0, 1), (0, 130), (77, 40), (300, 3), (63, 65)], dtype=dtype, rules=Scores(window=window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 40])
def test_soft_caps_and_sinks(dtype: torch.dtype, window: int) -> None:
    sinks = random(4, dtype=dtype, scale=2)
    for rules in (Scores(window, softcap=1.5), Scores(window, sinks=sinks), Scores(window, 1.5, sinks)):
        check([(0, 1), (0, 70), (77, 40)], dtype=dtype, rules=rules)


@pytest.mark.parametrize("head_dim", [16, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (4, 1)])
def test_head_shapes(head_dim: int, heads: int, kv_heads: int) -> None:
    check([(5, 20), (0, 33)], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=32)
