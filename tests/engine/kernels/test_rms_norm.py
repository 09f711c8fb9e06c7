import pytest
import torch

from engine.kernels.experts.expert_sum import expert_sum
from engine.kernels.rms_norm import Addition, rms_norm
from tests.engine.kernels.device import DTYPES, TOLERANCE, random, relative_error
from tests.engine.kernels.references import rms_norm_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("size", [64, 576, 1024])
def test_it_equals_the_reference(dtype: torch.dtype, rows: int, size: int) -> None:
    hidden, weight = random(rows, size, dtype=dtype, scale=3), random(size, dtype=dtype)
    before = hidden.clone()
    normed = rms_norm(hidden, weight, 1e-6)
    assert torch.equal(hidden, before)
    assert relative_error(normed, rms_norm_reference(hidden, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2])
def test_the_stream_grows_by_the_parts_before(dtype: torch.dtype, count: int) -> None:
    hidden, weight = random(5, 576, dtype=dtype, scale=3), random(576, dtype=dtype)
    parts = tuple(random(5, 576, dtype=dtype) for _ in range(count))
    expected = (hidden.float() + torch.stack(parts).float().sum(0)).to(dtype)
    normed = rms_norm(hidden, weight, 1e-6, Addition(parts))
    torch.testing.assert_close(hidden, expected)
    assert relative_error(normed, rms_norm_reference(hidden, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_token", [1, 3, 8])
def test_the_stream_grows_by_the_weighted_sum_before(dtype: torch.dtype, per_token: int) -> None:
    hidden, weight = random(5, 576, dtype=dtype, scale=3), random(576, dtype=dtype)
    outputs, shares = random(5 * per_token, 576, dtype=dtype), random(5, per_token).softmax(-1)
    expected = expert_sum(outputs, shares, hidden.clone(), add=True)
    normed = rms_norm(hidden, weight, 1e-6, Addition((outputs,), shares))
    torch.testing.assert_close(hidden, expected)
    assert relative_error(normed, rms_norm_reference(hidden, weight, 1e-6)) < TOLERANCE[dtype]
