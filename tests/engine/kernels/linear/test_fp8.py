"""Kernels that multiply with weights of 8 bits, with scales of rows and of blocks."""

import pytest
import torch

from engine.kernels.experts.expert_order import expert_order, unordered
from engine.kernels.experts.expert_sum import expert_sum
from engine.kernels.experts.grouped_linear import SILU, SMALL, grouped_linear
from engine.kernels.linear.fp8_linear import fp8_linear
from engine.kernels.linear.quantize_rows import quantize_rows
from engine.kernels.linear.small_linear import small_linear
from engine.kernels.linear.tile_product import Tiles
from engine.kernels.rms_norm import Addition, quantized_norm, rms_norm
from engine.model import experts as reference
from engine.model.experts import Experts
from engine.model.fp8_matrix import F8_MAX, Fp8Matrix, rounded
from tests.engine.kernels.device import DEVICE, DTYPES, F8_ERROR, TOLERANCE, random, relative_error
from tests.engine.kernels.references import small_linear_reference

# Tensor cores round sums of 8-bit products.
SUM_ERROR = {torch.float32: 3e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def matrix(*shape: int, group: int) -> Fp8Matrix:
    rows = rounded(random(*shape, scale=shape[-1] ** -0.5).view(-1, shape[-1]), group)
    return rows if len(shape) == 2 else rows.view(shape[0], shape[1], shape[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(5, 96), (3, 1536)])
def test_rows_are_rounded_each_with_a_scale_of_its_own(dtype: torch.dtype, rows: int, size: int) -> None:
    x = random(rows, size, dtype=dtype) * torch.logspace(-3, 2, rows, device=DEVICE)[:, None].to(dtype)
    x[1] = 0.0
    values, scales = quantize_rows(x)
    expected = rounded(x, size)
    torch.testing.assert_close(scales, expected.scales)
    assert values.float().abs().amax(1).tolist() == [F8_MAX if row != 1 else 0.0 for row in range(rows)]
    equal = (values.float() == expected.values.float()).float().mean()
    assert equal > 0.95
    assert relative_error(values.float() * scales, x) < F8_ERROR


def test_a_norm_in_8_bits_is_the_norm() -> None:
    x, norm, part = random(5, 96), random(96), random(5, 96)
    expected = rms_norm(x + part, norm, 1e-5)
    values, scales = quantized_norm(x, norm, 1e-5, Addition((part,)))
    torch.testing.assert_close(scales, quantize_rows(expected).scales)
    assert relative_error(values.float() * scales, expected) < F8_ERROR


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(80, 96, 32), (48, 256, 128), (128, 256, 128), (144, 80, 80), (128, 256, 256)]
)
@pytest.mark.parametrize("rows", [3, 70, 140])
def test_a_product_with_blocks_or_rows(dtype: torch.dtype, rows: int, n: int, k: int, group: int) -> None:
    weight, quantized = matrix(n, k, group=group), quantize_rows(random(rows, k))
    out = torch.full((rows + 1, n), 7.0, dtype=dtype, device=DEVICE)
    fp8_linear(quantized, weight, out[:rows])
    expected = (quantized.values.double() * quantized.scales) @ weight.products().double().t()
    assert relative_error(out[:rows], expected) < SUM_ERROR[dtype]
    assert (out[rows] == 7).all()


@pytest.mark.parametrize("tiles", [None, Tiles(16, 64, 64, 4, 2, turned=True), Tiles(32, 64, 128, 4, 2)])
@pytest.mark.parametrize(("n", "k", "group"), [(64, 256, 256), (48, 256, 64), (40, 96, 96)])
def test_products_turned_gated_and_in_parts(tiles: Tiles | None, n: int, k: int, group: int) -> None:
    rows = 21
    weight, quantized = matrix(2 * n, k, group=group), quantize_rows(random(rows, k))
    values, scales = quantized
    products = (values.double() * scales) @ weight.products().double().t()
    gated, parts = torch.empty(rows, n, device=DEVICE), torch.empty(2, rows, 2 * n, device=DEVICE)
    fp8_linear(quantized, weight, gated, gated=True, tiles=tiles)
    gate, up = products.chunk(2, -1)
    assert relative_error(gated, torch.nn.functional.silu(gate) * up) < 2 * SUM_ERROR[torch.float32]  # of two sums
    fp8_linear(quantized, weight, parts, tiles=tiles)
    assert relative_error(parts.sum(0), products) < SUM_ERROR[torch.float32]
    halves = (values[:, : k // 2].double() * scales) @ weight.products()[:, : k // 2].double().t()
    assert relative_error(parts[0], halves) < SUM_ERROR[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 384])
@pytest.mark.parametrize("rows", [1, 2])
def test_few_rows_keep_their_digits(dtype: torch.dtype, rows: int, group: int) -> None:
    x, norm = random(rows, 384, dtype=dtype), random(384, dtype=dtype)
    weight, gate_up = matrix(6, 384, group=group), matrix(2 * 5, 384, group=group)
    found = small_linear(x, weight)
    assert relative_error(found, small_linear_reference(x, weight.products())) < TOLERANCE[dtype]
    found = small_linear(x, gate_up, norm=norm, eps=1e-5, gated=True)
    expected = small_linear_reference(x, gate_up.products(), norm=norm, eps=1e-5, gated=True)
    assert relative_error(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "width", "group"), [(2, 64, 32, 32), (20, 96, 64, 32), (20, 80, 48, 0)])
def test_experts_are_as_exact_as_rows_of_8_bits(
    dtype: torch.dtype, tokens: int, hidden: int, width: int, group: int
) -> None:
    count, per_token = 5, 2
    gates_ups = matrix(count, 2 * width, hidden, group=group or hidden)
    downs = matrix(count, hidden, width, group=group or width)
    x, scores = random(tokens, hidden, dtype=dtype), random(tokens, count)
    choice = reference.choose_experts(scores, per_token, normed=True)
    chosen = choice.numbers.int()
    expected = reference.run_experts(x.double(), choice, Experts(gates_ups, downs))
    for order in [expert_order(chosen, count), *([unordered(chosen)] if tokens == 2 else [])]:
        tiles = None if dtype == torch.float32 else SMALL.some
        activations = grouped_linear(x, gates_ups, order, pairs_per_row=per_token, gate=SILU, tiles=tiles)
        same = grouped_linear(of_8_bits(x), gates_ups.products(), order, pairs_per_row=per_token, gate=SILU)
        assert relative_error(activations, same) < SUM_ERROR[dtype]
        outputs = grouped_linear(activations, downs, order, tiles=tiles)
        same = grouped_linear(of_8_bits(activations), downs.products(), order)
        assert relative_error(outputs, same) < SUM_ERROR[dtype]
        assert 0.01 < relative_error(expert_sum(outputs, choice.weights), expected) < 2 * F8_ERROR


def of_8_bits(x: torch.Tensor) -> torch.Tensor:
    values, scales = quantize_rows(x)
    return values.float() * scales
