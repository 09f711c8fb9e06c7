"""What is added to the residual stream is in the norm that comes next, however many rows and columns there are."""

import pytest
import torch
from torch import Tensor

from engine.cuda.triton_operations import TritonOperations
from engine.kernels.linear import small_linear
from engine.model.experts import Experts
from engine.model.fp8_matrix import Weight, rounded
from engine.model.operations import Operations, TorchOperations
from tests.engine.kernels.device import DEVICE, F8_ERROR, random, relative_error

SIZE, WIDE, EPS, COUNT, PER_TOKEN = 64, 128, 1e-5, 6, 2
LIMIT = {8: 4 * F8_ERROR, 32: 1e-4}  # without an addition it would be about 1
BITS = pytest.mark.parametrize("bits", [8, 32])


def matrix(bits: int, n: int, k: int) -> Weight:
    values = random(n, k, scale=k**-0.5)
    return rounded(values, k) if bits == 8 else values


def experts(bits: int) -> Experts:
    gates_ups, downs = matrix(bits, COUNT * 2 * WIDE, SIZE), matrix(bits, COUNT * SIZE, WIDE)
    return Experts(gates_ups.view(COUNT, 2 * WIDE, SIZE), downs.view(COUNT, SIZE, WIDE))


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


@BITS
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_what_experts_make(bits: int, rows: int) -> None:
    torch.manual_seed(rows)
    layer, square = experts(bits), matrix(bits, SIZE, SIZE)
    stream, norm, scores = random(rows, SIZE), random(SIZE), random(rows, COUNT)

    def found(operations: Operations, stream: Tensor, norm: Tensor) -> list[Tensor]:
        def add() -> None:
            chosen = operations.choose_experts(scores.to(stream.dtype), PER_TOKEN, normed=True)
            operations.add_experts(stream, operations.norm(stream, norm, EPS), chosen, layer)

        add()
        product = operations.norm_linear(stream, norm, EPS, square)
        add()
        add()
        operations.add_linear(stream, product, square)
        normed = operations.norm(stream, norm, EPS)
        add()
        operations.settle(stream)
        return [product, normed, stream]

    expected = found(TorchOperations(), stream.clone(), norm)
    for one, other in zip(found(ours(), stream, norm), expected, strict=True):
        assert relative_error(one, other) < LIMIT[bits]
