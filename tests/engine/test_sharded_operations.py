"""What ranks add to the residual stream, with a collective that stands for two ranks of equal parts."""

import pytest
import torch
from torch import Tensor

from engine import sharded_operations
from engine.operations import TorchOperations
from engine.sharded_operations import ShardedOperations


class Twice:
    """Two ranks that have computed the same."""

    def __init__(self) -> None:
        self.under_way = self.most_under_way = 0

    def add_sum(self, hidden: Tensor, part: Tensor) -> None:
        hidden.add_(part, alpha=2)

    def begin_sum(self, part: Tensor) -> "TwiceUnderWay":
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        return TwiceUnderWay(self, part)


class TwiceUnderWay:
    """The sum is there when it was waited for, and not before."""

    def __init__(self, collective: Twice, part: Tensor) -> None:
        self.collective, self.part = collective, part

    def wait(self) -> None:
        self.collective.under_way -= 1
        self.part.mul_(2)


class FewRows:
    def __init__(self, most: int) -> None:
        self.most = most
        self.part = torch.empty(0)

    def buffer(self, like: Tensor) -> Tensor | None:
        self.part = torch.empty_like(like)
        return self.part if len(like) <= self.most else None

    def add_to(self, hidden: Tensor) -> None:
        hidden.add_(self.part, alpha=2)


@pytest.mark.parametrize("rows", [1, 7, 31, 32, 33, 101])
@pytest.mark.parametrize("few_rows", [None, FewRows(4)])
def test_the_residual_stream_grows_by_the_sum(
    rows: int, few_rows: FewRows | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_operations, "MANY_ROWS", 32)
    collective = Twice()
    operations = ShardedOperations(TorchOperations(), collective, few_rows)  # type: ignore[arg-type]
    hidden, x, weight = torch.randn(rows, 24), torch.randn(rows, 16), torch.randn(24, 16)
    expected = hidden + 2 * (x @ weight.t())
    operations.add_linear(hidden, x, weight)
    torch.testing.assert_close(hidden, expected)
    assert collective.under_way == 0
    assert collective.most_under_way == (4 if rows >= 32 else 0), "pieces travel beside each other"
