import pytest
import torch

from engine.kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from tests.engine.kernels.device import DTYPES, TOLERANCE, random, relative_error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("size", [64, 576, 1024])
def test_the_sum_is_kept_and_its_norm_returned(dtype: torch.dtype, rows: int, size: int) -> None:
    hidden, delta, weight = (random(*shape, dtype=dtype, scale=3) for shape in ((rows, size), (rows, size), (size,)))
    total, expected = add_rms_norm_reference(hidden, delta, weight, 1e-6)
    normed = add_rms_norm(hidden, delta, weight, 1e-6)
    assert torch.equal(hidden, total)
    assert relative_error(normed, expected) < TOLERANCE[dtype]


def test_without_a_delta_hidden_stays_as_it_is() -> None:
    hidden, weight = random(3, 64), random(64)
    before = hidden.clone()
    normed = add_rms_norm(hidden, None, weight, 1e-5)
    assert torch.equal(hidden, before)
    assert relative_error(normed, add_rms_norm_reference(hidden, None, weight, 1e-5)[1]) < 2e-6
