import pytest
import torch

from engine.kernels.attention.rotate_store import Rotation, rotate_store
from tests.engine.kernels.device import DEVICE, DTYPES, TOLERANCE, edged, random, relative_error
from tests.engine.kernels.references import rotate_store_reference

BLOCKS, POISON = 12, 77.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 64), (16, 8, 128), (2, 2, 48)])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("block_size", [16, 64])
def test_queries_are_rotated_and_only_the_given_slots_written(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, norms: bool, block_size: int
) -> None:
    check(dtype, heads, kv_heads, head_dim, block_size, norms=norms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 48), (64, 64), (128, 32)])
def test_the_first_dimensions_are_rotated_and_queries_scaled_by_position(
    dtype: torch.dtype, head_dim: int, rotary: int, scaled: bool
) -> None:
    check(dtype, 9, 3, head_dim, 16, rotary=rotary, scaled=scaled)


def check(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    norms: bool = False,
    rotary: int | None = None,
    scaled: bool = False,
) -> None:
    tokens = 5
    qkv = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(BLOCKS * block_size)[:tokens].to(DEVICE, torch.int32)
    slots[1] = -1  # padding
    positions = torch.randint(0, 30, (tokens,), dtype=torch.int32, device=DEVICE)
    angles = random(30, (rotary or head_dim) // 2, scale=5)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    weights = [edged(random(head_dim, dtype=dtype)) if norms else None for _ in range(2)]
    cache = torch.full((BLOCKS, kv_heads, 2, block_size, head_dim), POISON, dtype=dtype, device=DEVICE)
    expected_cache = cache.clone()
    rotation = Rotation(slots, positions, table, *weights, 1e-6, random(30) if scaled else None)
    expected = rotate_store_reference(qkv.clone(), expected_cache, rotation)
    queries = rotate_store(qkv, cache, rotation)
    assert relative_error(queries, expected) < TOLERANCE[dtype]
    assert torch.equal(cache == POISON, expected_cache == POISON)
    written = expected_cache != POISON
    assert written.sum() == (tokens - 1) * 2 * kv_heads * head_dim
    assert relative_error(cache[written], expected_cache[written]) < TOLERANCE[dtype]
