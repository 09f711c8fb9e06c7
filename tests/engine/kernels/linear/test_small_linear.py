import pytest
import torch

from engine.kernels.linear.small_linear import small_linear
from tests.engine.kernels.device import DEVICE, DTYPES, TOLERANCE, random, relative_error
from tests.engine.kernels.references import small_linear_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 24, 96), (2, 30, 1024), (2, 9, 3072), (1, 3, 12288)])
def test_it_equals_the_reference(dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    x, weight = random(rows, k, dtype=dtype), random(n, k, dtype=dtype)
    assert relative_error(small_linear(x, weight), small_linear_reference(x, weight)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_norm_before_it(dtype: torch.dtype, rows: int) -> None:
    x, weight, norm = random(rows, 576, dtype=dtype, scale=5), random(11, 576, dtype=dtype), random(576, dtype=dtype)
    found = small_linear(x, weight, norm=norm, eps=1e-5)
    assert relative_error(found, small_linear_reference(x, weight, norm=norm, eps=1e-5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_norm_before_it_and_silu_of_a_half_times_the_other_after(dtype: torch.dtype, rows: int) -> None:
    x, weight, norm = random(rows, 384, dtype=dtype), random(2 * 21, 384, dtype=dtype), random(384, dtype=dtype)
    found = small_linear(x, weight, norm=norm, eps=1e-5, gated=True)
    expected = small_linear_reference(x, weight, norm=norm, eps=1e-5, gated=True)
    assert found.shape == (rows, 21)
    assert relative_error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_the_addition_after_it(dtype: torch.dtype, rows: int) -> None:
    x, weight, stream = random(rows, 384, dtype=dtype), random(20, 384, dtype=dtype), random(rows, 20, dtype=dtype)
    expected = small_linear_reference(x, weight, add_to=stream)
    found = small_linear(x, weight, add_to=stream)
    assert found is stream
    assert relative_error(found, expected) < TOLERANCE[dtype]


def test_it_writes_where_it_is_told() -> None:
    x, weight = random(2, 64), random(19, 64)
    out = torch.full((3, 19), 7.0, device=DEVICE)
    small_linear(x, weight, out=out[:2])
    assert relative_error(out[:2], small_linear_reference(x, weight)) < 2e-6
    assert (out[2] == 7).all()
