"""Operations of a model that ranks share: additions to the residual stream are summed over the ranks.

`add_linear` begins a sum, and the next reader of those rows of the stream finishes it. The reader is nearly always an
RMS norm, and one kernel does both. With few rows a sum's time is that of its launch, with many rows that of moving
them. Therefore PeerSum, where it exists, sums few rows, and many rows are summed in pieces: while one piece travels,
the others are computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model.experts import Chosen, Experts
from engine.model.fp8_matrix import Weight
from engine.model.operations import Operations
from engine.parallel.collective import Collective

PIECES = 2  # of a step: 6 % faster than four (benchmarks/tensor_parallel.py, 8B shape, H200)
PIECE_ROWS = 1024  # fewest rows of a piece; more than a CUDA graph has


class Sum(Protocol):
    """A sum that has been begun for some rows of the residual stream."""

    def finish(self, hidden: Tensor, norm: Tensor | None, eps: float) -> Tensor | None:
        """`hidden` += the sum of all ranks' parts. Returns the RMS norm of the result, or None when there are no
        weights for it or the caller has to compute it."""


class FewRows(Protocol):
    """Implemented by engine.parallel.peer_sum.PeerSum."""

    def buffer(self, like: Tensor) -> Tensor | None: ...

    def finish(self, hidden: Tensor, norm: Tensor | None, eps: float) -> Tensor | None: ...


class OnItsWay(Protocol):
    """A sum that engine.parallel.collective.Collective or engine.parallel.peer_push.PeerPush has begun."""

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors to add, in this order; the current stream waits for them."""


class ManyRows(Protocol):
    def begin_sum(self, part: Tensor) -> OnItsWay: ...


class ShardedOperations:
    """Implements `Operations`. The weights of `add_linear` are divided by columns, other weights by rows or not at
    all."""

    def __init__(
        self,
        inner: Operations,
        collective: Collective,
        few_rows: FewRows | None = None,
        many_rows: ManyRows | None = None,
    ) -> None:
        self._inner = inner
        self._collective = collective
        self._few_rows = few_rows
        self._many_rows = many_rows or collective
        self._begun: dict[int, tuple[Tensor, Sum]] = {}  # by address: rows of the stream, and their sum
        self.embed = inner.embed
        self.linear = inner.linear
        self.gated_linear = inner.gated_linear
        self.choose_experts = inner.choose_experts
        self.run_experts = inner.run_experts

    def norm(self, hidden: Tensor, weights: Tensor, eps: float, parts: tuple[Tensor, ...] = ()) -> Tensor:
        _, begun = self._begun.pop(hidden.data_ptr(), (None, None))
        normed = None if begun is None else begun.finish(hidden, weights, eps)
        return self._inner.norm(hidden, weights, eps, parts) if normed is None else normed

    def norm_linear(
        self, hidden: Tensor, norm: Tensor, eps: float, weight: Weight, out: Tensor | None = None
    ) -> Tensor:
        if hidden.data_ptr() not in self._begun:
            return self._inner.norm_linear(hidden, norm, eps, weight, out)
        return self._inner.linear(self.norm(hidden, norm, eps), weight, out)

    def norm_gated_linear(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Weight) -> Tensor:
        if hidden.data_ptr() not in self._begun:
            return self._inner.norm_gated_linear(hidden, norm, eps, gate_up)
        return self._inner.gated_linear(self.norm(hidden, norm, eps), gate_up)

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Weight) -> None:
        self._begin(hidden, lambda out: self._inner.linear(x, weight, out))

    def add_experts(self, hidden: Tensor, x: Tensor, chosen: Chosen, experts: Experts) -> None:
        biased = self._collective.rank == 0  # because the sum has the biases once
        self._begin(hidden, lambda out: self._inner.run_experts(x, chosen, experts, biased=biased, out=out))

    def add_normed_linear(self, hidden: Tensor, x: Tensor, weight: Weight, norm: Tensor, eps: float) -> None:
        hidden.add_(self._inner.norm(self._collective.sum(self._inner.linear(x, weight)), norm, eps))

    def shared_norm(self, x: Tensor, weights: Tensor, eps: float) -> Tensor:
        squares = self._collective.sum(x.float().square().mean(-1, keepdim=True)) / self._collective.size
        return (x * torch.rsqrt(squares + eps)).to(x.dtype) * weights

    def settle(self, hidden: Tensor) -> None:
        begun, self._begun = self._begun, {}
        for rows, one in begun.values():
            one.finish(rows, None, 0.0)

    def pieces(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.chunk(max(1, min(PIECES, len(rows) // PIECE_ROWS)))

    def _begin(self, hidden: Tensor, part_in: Callable[[Tensor | None], Tensor]) -> None:
        """part_in: computes this rank's part, in a buffer if it is given one."""
        assert hidden.data_ptr() not in self._begun, "the next reader of the stream finishes the sum"
        self._begun[hidden.data_ptr()] = (hidden, self._sum(hidden, part_in))

    def _sum(self, hidden: Tensor, part_in: Callable[[Tensor | None], Tensor]) -> Sum:
        if len(hidden) >= PIECE_ROWS:
            return _Begun(self._inner, self._many_rows.begin_sum(part_in(None)))
        buffer = None if self._few_rows is None else self._few_rows.buffer(hidden)
        part = part_in(buffer)
        if self._few_rows is not None and buffer is not None:
            return self._few_rows
        return _Begun(self._inner, _Here(self._collective.sum(part)))


@dataclass(slots=True)
class _Here:
    """Implements `OnItsWay` for a sum on the current stream."""

    part: Tensor

    def parts(self) -> tuple[Tensor, ...]:
        return (self.part,)


@dataclass(slots=True)
class _Begun:
    """Implements `Sum`."""

    inner: Operations
    on_its_way: OnItsWay

    def finish(self, hidden: Tensor, norm: Tensor | None, eps: float) -> Tensor | None:
        parts = self.on_its_way.parts()
        if norm is not None:
            return self.inner.norm(hidden, norm, eps, parts)
        for part in parts:
            hidden.add_(part)
        return None
