"""Operations of a model that ranks share: what they add to the residual stream is summed over them. The runner's
builder puts it around the operations that it chose.

The fewer rows, the more the time of a sum is that of its launch; the more rows, that of moving them. So few rows are
summed by PeerSum, where there is one, and many in pieces: while one piece travels the next is computed.
"""

from typing import Protocol

from torch import Tensor

from engine.collective import Collective
from engine.operations import Operations

MANY_ROWS = 2048
PIECES = 4


class FewRows(Protocol):
    """As engine.peer_sum.PeerSum."""

    def buffer(self, like: Tensor) -> Tensor | None: ...

    def add_to(self, hidden: Tensor) -> None: ...


class ShardedOperations:
    """Implements `engine.operations.Operations`. The weights of `add_linear` are divided by columns, the others by rows
    or not at all."""

    def __init__(self, inner: Operations, collective: Collective, few_rows: FewRows | None = None) -> None:
        self._inner = inner
        self._collective = collective
        self._few_rows = few_rows
        self.embed = inner.embed
        self.linear = inner.linear
        self.norm_linear = inner.norm_linear
        self.norm_gated_linear = inner.norm_gated_linear

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor) -> None:
        buffer = None if self._few_rows is None else self._few_rows.buffer(hidden)
        if self._few_rows is not None and buffer is not None:
            self._inner.linear(x, weight, buffer)
            self._few_rows.add_to(hidden)
        elif len(x) < MANY_ROWS:
            self._collective.add_sum(hidden, self._inner.linear(x, weight))
        else:
            self._add_in_pieces(hidden, x, weight)

    def _add_in_pieces(self, hidden: Tensor, x: Tensor, weight: Tensor) -> None:
        under_way = []
        for piece in x.chunk(PIECES):
            part = self._inner.linear(piece, weight)
            under_way.append((part, self._collective.begin_sum(part)))
        for rows, (part, work) in zip(hidden.chunk(PIECES), under_way, strict=True):
            work.wait()
            rows.add_(part)
