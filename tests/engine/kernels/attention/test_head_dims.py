"""Heads whose size is no power of two, beside some whose size is, in all kernels that take heads."""

import pytest
import torch

from engine.kernels.attention.scores import PLAIN, Scores
from engine.model.fp8_matrix import F8
from tests.engine.kernels.attention import test_decode_attention, test_prefill_attention, test_rotate_store
from tests.engine.kernels.device import DTYPES, HALF, random

pytestmark = pytest.mark.slow

CONTEXTS = [1, 300, 64, 65]
CHUNKS = [(0, 1), (0, 70), (77, 40)]
SIZES = [64, 80, 96, 100, 128, 192, 256]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", SIZES)
def test_decodes_of_one_piece_and_of_several(dtype: torch.dtype, head_dim: int) -> None:
    for rules in (PLAIN, Scores(100, 1.5, random(4, dtype=dtype, scale=2))):
        test_decode_attention.check(CONTEXTS, head_dim=head_dim, dtype=dtype, programs=5, rules=rules)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", SIZES)
def test_prompts(dtype: torch.dtype, head_dim: int) -> None:
    for rules in (PLAIN, Scores(40, 1.5, random(2, dtype=dtype, scale=2))):
        test_prefill_attention.check(CHUNKS, heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype, rules=rules)


@pytest.mark.parametrize("head_dim", SIZES)
def test_keys_and_values_in_8_bits(head_dim: int) -> None:
    test_decode_attention.check(CONTEXTS, head_dim=head_dim, dtype=HALF, kv_dtype=F8, programs=5)
    test_prefill_attention.check(CHUNKS, heads=2, kv_heads=1, head_dim=head_dim, dtype=HALF, kv_dtype=F8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", SIZES)
def test_new_tokens_are_normalised_rotated_in_part_and_stored(dtype: torch.dtype, head_dim: int) -> None:
    for given in ({"norms": True}, {"rotary": head_dim // 4 * 2, "scaled": True}):
        test_decode_attention.check_rotation(dtype, 6, 2, head_dim, **given)
        test_rotate_store.check(dtype, 6, 2, head_dim, 16, **given)
