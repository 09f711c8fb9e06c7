"""The operations of a GPU with weights of 8 bits, beside plain torch with the products; compiled on a GPU."""

import pytest
import torch
from torch import Tensor

from engine.cuda.triton_operations import TritonOperations
from engine.model.fp8_matrix import Fp8Matrix, rounded
from engine.model.operations import Operations, TorchOperations
from tests.engine.kernels.device import DEVICE, DTYPES, F8_ERROR, TOLERANCE, random, relative_error

SIZE, EPS = 64, 1e-5


def weight(n: int, group: int) -> Fp8Matrix:
    return rounded(random(n, SIZE, scale=SIZE**-0.5), group)


def results(operations: Operations, x: Tensor, norm: Tensor, square: Fp8Matrix, gate_up: Fp8Matrix) -> list[Tensor]:
    added, normed, seen = x.clone(), x.clone(), x.clone()
    operations.add_linear(added, x, square)
    operations.settle(added)
    operations.add_normed_linear(normed, x, square, norm, EPS)
    operations.add_linear(seen, x, square)
    operations.add_linear(seen, x, square)
    after = operations.norm_linear(seen, norm, EPS, square)
    out = torch.empty(len(x) + 1, len(gate_up), dtype=x.dtype, device=x.device)
    operations.linear(x, gate_up, out[:-1])
    products = operations.linear(x, square), operations.norm_linear(x, norm, EPS, square)
    gated = operations.gated_linear(x, gate_up), operations.norm_gated_linear(x, norm, EPS, gate_up)
    return [added - x, normed - x, seen - x, after, out[:-1], *products, *gated]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, SIZE], ids=["blocks", "rows"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_operations_are_as_exact_as_rows_of_8_bits(dtype: torch.dtype, group: int, rows: int) -> None:
    """One or two rows keep all their digits."""
    torch.manual_seed(rows)
    x, norm = random(rows, SIZE, dtype=dtype), random(SIZE, dtype=dtype)
    matrices = weight(SIZE, group), weight(2 * SIZE, group)
    found = results(TritonOperations(torch.zeros(1, dtype=torch.int32, device=DEVICE)), x, norm, *matrices)
    expected = results(TorchOperations(), x.double(), norm.double(), *matrices)
    for ours, theirs in zip(found, expected, strict=True):
        error = relative_error(ours, theirs)
        assert error < (3 * TOLERANCE[dtype] if rows <= 2 else 1.5 * F8_ERROR)
        assert (error > 0.01) == (rows > 2)


def test_what_a_failed_step_has_left_is_added_to_no_other() -> None:
    """Whose stream may lie where that of the failed one lay."""
    operations = TritonOperations(torch.zeros(1, dtype=torch.int32, device=DEVICE))
    x, norm, table = random(5, SIZE), random(SIZE), random(3, SIZE)
    expected = operations.norm(x.clone(), norm, EPS)
    operations.add_linear(x, random(5, SIZE), weight(SIZE, SIZE))
    operations.embed(torch.zeros(1, dtype=torch.int32, device=DEVICE), table)
    torch.testing.assert_close(operations.norm(x, norm, EPS), expected)
