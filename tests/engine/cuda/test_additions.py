"""What is added to the residual stream is in the norm that comes next, however many rows and columns there are."""

import pytest
import torch
from torch import Tensor

from engine.cuda.triton_operations import TritonOperations
from engine.kernels import small_linear
from engine.model.fp8_matrix import Weight, rounded
from engine.model.operations import Operations, TorchOperations
from tests.engine.kernels.device import DEVICE, F8_ERROR, random, relative_error

SIZE, WIDE, EPS = 64, 128, 1e-5
LIMIT = {8: 4 * F8_ERROR, 32: 1e-4}  # without an addition it would be about 1
BITS = pytest.mark.parametrize("bits", [8, 32])


def matrix(bits: int, n: int, k: int) -> Weight:
    values = random(n, k, scale=k**-0.5)
    return rounded(values, k) if bits == 8 else values


def ours() -> Operations:
    return TritonOperations(torch.zeros(1, dtype=torch.int32, device=DEVICE))


@BITS
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_products_of_rows_too_wide_for_one_pass(bits: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the stream is narrow enough for it."""
    torch.manual_seed(rows)
    monkeypatch.setattr(small_linear, "MAX_K", SIZE)
    monkeypatch.setattr(small_linear, "MAX_K_OF_TWO", SIZE)
    stream, wide, norm = random(rows, SIZE), random(rows, WIDE, scale=3.0), random(SIZE)
    down, square, gate_up = matrix(bits, SIZE, WIDE), matrix(bits, SIZE, SIZE), matrix(bits, 2 * SIZE, SIZE)

    def found(operations: Operations, stream: Tensor, wide: Tensor, norm: Tensor) -> list[Tensor]:
        operations.add_linear(stream, wide, down)
        product = operations.norm_linear(stream, norm, EPS, square)
        operations.add_linear(stream, wide, down)
        gated = operations.norm_gated_linear(stream, norm, EPS, gate_up)
        operations.add_linear(stream, wide, down)
        operations.settle(stream)
        return [product, gated, stream]

    expected = found(TorchOperations(), stream.clone(), wide, norm)
    for one, other in zip(found(ours(), stream, wide, norm), expected, strict=True):
        assert relative_error(one, other) < LIMIT[bits]
