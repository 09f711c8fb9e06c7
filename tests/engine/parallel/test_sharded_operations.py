"""What ranks add to the residual stream, with a collective that stands for two ranks of equal parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.operations import TorchOperations
from engine.parallel import sharded_operations
from engine.parallel.sharded_operations import ShardedOperations

SIZE, EPS = 24, 1e-6


class Twice:
    """Two ranks that have computed the same."""

    def __init__(self) -> None:
        self.under_way = self.most_under_way = 0

    def sum(self, part: Tensor) -> Tensor:
        return part.mul_(2)

    def begin_sum(self, part: Tensor) -> "TwiceUnderWay":
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return TwiceUnderWay(self, part)


class TwiceUnderWay:
    """The sum is there when it was waited for, and not before."""

    def __init__(self, collective: Twice, part: Tensor) -> None:
        self.collective, self.part = collective, part

    def parts(self) -> tuple[Tensor, ...]:
        self.collective.under_way -= 1
        return self.part, self.part


class FewRows:
    def __init__(self, most: int) -> None:
        self.most = most
        self.part = torch.empty(0)

    def buffer(self, like: Tensor) -> Tensor | None:
        self.part = torch.empty_like(like)
        return self.part if len(like) <= self.most else None

    def finish(self, hidden: Tensor, norm: Tensor | None, eps: float) -> Tensor | None:
        return TorchOperations().norm(hidden, torch.ones(SIZE) if norm is None else norm, eps, (self.part, self.part))


@pytest.mark.parametrize("rows", [1, 7, 15, 16, 17, 31, 32, 33, 101])
@pytest.mark.parametrize("few_rows", [None, FewRows(4)])
def test_the_residual_stream_grows_by_the_sum_before_it_is_read(
    rows: int, few_rows: FewRows | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers, so to speak, with a norm before each product, beside the same without ranks."""
    monkeypatch.setattr(sharded_operations, "PIECE_ROWS", 16)
    collective = Twice()
    operations = ShardedOperations(TorchOperations(), collective, few_rows)  # type: ignore[arg-type]
    hidden = torch.randn(rows, SIZE, dtype=torch.float64)
    expected = hidden.clone()
    norms = torch.rand(3, SIZE, dtype=torch.float64)
    ups = torch.randn(3, 2 * 16, SIZE, dtype=torch.float64) / 5
    downs = torch.randn(3, SIZE, 16, dtype=torch.float64) / 5
    for norm, up, down in zip(norms, ups, downs, strict=True):
        for piece in operations.pieces(hidden):
            operations.add_linear(piece, operations.norm_gated_linear(piece, norm, EPS, up), down)
        gate, values = (F.rms_norm(expected, (SIZE,), norm, EPS) @ up.t()).chunk(2, dim=-1)
        expected += 2 * ((F.silu(gate) * values) @ down.t())
    piece = operations.pieces(hidden)[0]
    product = operations.norm_linear(piece, norms[0], EPS, ups[0])
    torch.testing.assert_close(product, F.rms_norm(expected[: len(piece)], (SIZE,), norms[0], EPS) @ ups[0].t())
    operations.settle(hidden)
    torch.testing.assert_close(hidden, expected)
    assert collective.under_way == 0
    pieces = min(2, rows // 16)
    assert collective.most_under_way == pieces, "pieces travel beside each other"
