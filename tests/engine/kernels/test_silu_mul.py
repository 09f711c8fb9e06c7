import pytest
import torch

from engine.kernels.silu_mul import silu_mul
from tests.engine.kernels.device import DTYPES, TOLERANCE, random, relative_error
from tests.engine.kernels.references import silu_mul_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 1024, 1536])
def test_it_equals_the_reference(dtype: torch.dtype, size: int) -> None:
    gate_up = random(5, 2 * size, dtype=dtype, scale=4)
    assert relative_error(silu_mul(gate_up), silu_mul_reference(gate_up)) < TOLERANCE[dtype]


def test_large_gates_neither_overflow_nor_vanish() -> None:
    gate_up = random(2, 128)
    gate_up[:, :64] = torch.linspace(-120, 120, 64)
    assert relative_error(silu_mul(gate_up), silu_mul_reference(gate_up)) < 2e-6
