import pytest
import torch

from engine.kernels.small_linear import small_linear, small_linear_reference
from tests.engine.kernels.device import DEVICE, DTYPES, TOLERANCE, random, relative_error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("n", "k"), [(24, 96), (30, 1024), (9, 3072)])
def test_it_equals_the_reference(dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype)
    assert relative_error(small_linear(x, weight), small_linear_reference(x, weight)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4])
def test_the_norm_before_it(dtype: torch.dtype, rows: int) -> None:
    x, weight, norm = random(rows, 576, dtype=dtype, scale=5), random(11, 576, dtype=dtype), random(576, dtype=dtype)
    found = small_linear(x, weight, norm=norm, eps=1e-5)
    assert relative_error(found, small_linear_reference(x, weight, norm=norm, eps=1e-5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3])
def test_silu_before_it_and_the_addition_after(dtype: torch.dtype, rows: int) -> None:
    x, weight = random(rows, 2 * 384, dtype=dtype), random(20, 384, dtype=dtype)
    stream = random(rows, 20, dtype=dtype)
    expected = small_linear_reference(x, weight, silu=True, add_to=stream)
    found = small_linear(x, weight, silu=True, add_to=stream)
    assert found is stream
    assert relative_error(found, expected) < TOLERANCE[dtype]


def test_it_writes_where_it_is_told() -> None:
    x, weight = random(2, 64), random(19, 64)
    out = torch.full((3, 19), 7.0, device=DEVICE)
    small_linear(x, weight, out=out[:2])
    assert relative_error(out[:2], small_linear_reference(x, weight)) < 2e-6
    assert (out[2] == 7).all()
