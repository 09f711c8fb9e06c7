"""The model's work around attention as fused Triton kernels: on a GPU, and in tests in Triton's interpreter.

Matrix products of one or two rows are Triton's too, with norm, gate and residual inside; for more rows cuBLAS is
faster, but on Hopper not for few rows of 8 bits. Where weights have 8 bits, so have the rows that they are multiplied
with, but for one or two rows outside experts: there the time is that of reading the weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.embedding import embed
from engine.kernels.experts.choose_experts import choose_experts
from engine.kernels.experts.expert_order import expert_order, unordered
from engine.kernels.experts.expert_sum import expert_sum
from engine.kernels.experts.grouped_linear import SILU, grouped_linear
from engine.kernels.linear.fp8_linear import MAX_GATED_ROWS, fp8_linear, is_few, num_parts
from engine.kernels.linear.quantize_rows import QuantizedRows, quantize_rows
from engine.kernels.linear.small_linear import is_small, small_linear
from engine.kernels.rms_norm import NOTHING, Addition, quantized_norm, rms_norm
from engine.kernels.silu_mul import silu_mul
from engine.model.experts import Chosen, Experts
from engine.model.fp8_matrix import Fp8Matrix, Weight


class TritonOperations:
    """Implements `Operations`. `sampled`: int32, the tokens that the step before sampled; negative token ids refer to
    them."""

    def __init__(self, sampled: Tensor) -> None:
        self._sampled = sampled
        # By address: rows of the stream, and what their next norm adds to them.
        self._begun: dict[int, tuple[Tensor, Addition]] = {}

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        self._begun.clear()  # of a step that failed
        return embed(token_ids, self._sampled, table)

    def linear(self, x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
        return small_linear(x, weight, out=out) if is_small(x) else _product(_rows_for(weight, x), weight, x.dtype, out)

    def norm(self, hidden: Tensor, weights: Tensor, eps: float, parts: tuple[Tensor, ...] = ()) -> Tensor:
        return rms_norm(hidden, weights, eps, Addition(parts) if parts else self._addition(hidden))

    def norm_linear(
        self, hidden: Tensor, norm: Tensor, eps: float, weight: Weight, out: Tensor | None = None
    ) -> Tensor:
        if self._takes_one_pass(hidden):
            return small_linear(hidden, weight, norm=norm, eps=eps, out=out)
        return _product(self._normed(hidden, norm, eps, weight), weight, hidden.dtype, out)

    def gated_linear(self, x: Tensor, gate_up: Weight) -> Tensor:
        if is_small(x):
            return small_linear(x, gate_up, gated=True)
        return _gated_product(_rows_for(gate_up, x), gate_up, x.dtype)

    def norm_gated_linear(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Weight) -> Tensor:
        if self._takes_one_pass(hidden):
            return small_linear(hidden, gate_up, norm=norm, eps=eps, gated=True)
        return _gated_product(self._normed(hidden, norm, eps, gate_up), gate_up, hidden.dtype)

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Weight) -> None:
        if is_small(x):
            small_linear(x, weight, add_to=hidden)
        elif isinstance(weight, Tensor):
            hidden.addmm_(x, weight.t())
        else:
            self._begin(hidden, Addition(_product_in_parts(x, weight)))

    def add_normed_linear(self, hidden: Tensor, x: Tensor, weight: Weight, norm: Tensor, eps: float) -> None:
        hidden.add_(rms_norm(self.linear(x, weight), norm, eps))

    def shared_norm(self, x: Tensor, weights: Tensor, eps: float) -> Tensor:
        return rms_norm(x.contiguous(), weights, eps)

    def choose_experts(self, scores: Tensor, per_token: int, *, normed: bool) -> Chosen:
        return choose_experts(scores, per_token, normed=normed)

    def run_experts(self, x: Tensor, chosen: Chosen, experts: Experts, *, biased: bool, out: Tensor | None) -> Tensor:
        return expert_sum(_outputs(x, chosen.numbers, experts, biased=biased), chosen.weights, out)

    def add_experts(self, hidden: Tensor, x: Tensor, chosen: Chosen, experts: Experts) -> None:
        outputs = _outputs(x, chosen.numbers, experts, biased=True)
        if is_small(x):
            expert_sum(outputs, chosen.weights, hidden, add=True)
        else:
            self._begin(hidden, Addition((outputs,), chosen.weights))

    def settle(self, hidden: Tensor) -> None:
        begun, self._begun = self._begun, {}
        for rows, addition in begun.values():
            if addition.weights is not None:
                expert_sum(addition.parts[0], addition.weights, rows, add=True)
            else:
                for part in addition.parts:
                    rows.add_(part)

    def pieces(self, rows: Tensor) -> Sequence[Tensor]:
        return (rows,)

    def _takes_one_pass(self, hidden: Tensor) -> bool:
        """Whether the norm of `hidden` is computed with the product of it. What was added to `hidden` may come of rows
        that are too wide for such a pass."""
        return is_small(hidden) and hidden.data_ptr() not in self._begun

    def _begin(self, hidden: Tensor, addition: Addition) -> None:
        self.settle(hidden)
        self._begun[hidden.data_ptr()] = (hidden, addition)

    def _addition(self, hidden: Tensor) -> Addition:
        """What the norm of `hidden` adds to it."""
        return self._begun.pop(hidden.data_ptr(), (hidden, NOTHING))[1]

    def _normed(self, hidden: Tensor, norm: Tensor, eps: float, weight: Weight) -> Tensor | QuantizedRows:
        """The norm of `hidden`, in as many bits as `weight` has."""
        addition = self._addition(hidden)
        plain = isinstance(weight, Tensor)
        return (rms_norm if plain else quantized_norm)(hidden, norm, eps, addition)


def _rows_for(weight: Weight, x: Tensor) -> Tensor | QuantizedRows:
    """x, in as many bits as the weight has."""
    return x if isinstance(weight, Tensor) else quantize_rows(x.contiguous())


def _product(rows: Tensor | QuantizedRows, weight: Weight, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if isinstance(weight, Tensor):
        assert isinstance(rows, Tensor)
        return torch.mm(rows, weight.t(), out=out)
    assert isinstance(rows, QuantizedRows)
    values, scales = rows
    if out is None:
        out = values.new_empty(len(values), len(weight), dtype=dtype)
    needs_own = weight.group != values.shape[1] or out.dtype != torch.bfloat16 or not values.is_cuda
    if needs_own or is_few(rows, weight):
        return fp8_linear(rows, weight, out)
    return torch._scaled_mm(
        values, weight.values.t(), scales, weight.scales.t(), out_dtype=out.dtype, use_fast_accum=True, out=out
    )


def _product_in_parts(x: Tensor, weight: Fp8Matrix) -> tuple[Tensor, ...]:
    """One part or two whose sum is the product."""
    rows = quantize_rows(x.contiguous())
    if num_parts(rows, weight) > 1:
        return fp8_linear(rows, weight, x.new_empty(2, len(x), len(weight))).unbind()
    return (_product(rows, weight, x.dtype, None),)


def _gated_product(rows: Tensor | QuantizedRows, gate_up: Weight, dtype: torch.dtype) -> Tensor:
    if isinstance(rows, QuantizedRows) and isinstance(gate_up, Fp8Matrix) and is_few(rows, gate_up, MAX_GATED_ROWS):
        out = rows.values.new_empty(len(rows.values), len(gate_up) // 2, dtype=dtype)
        return fp8_linear(rows, gate_up, out, gated=True)
    return silu_mul(_product(rows, gate_up, dtype, None))


def _outputs(x: Tensor, chosen: Tensor, experts: Experts, *, biased: bool) -> Tensor:
    """[num_tokens * per_token, hidden], what each of the chosen experts makes of its token."""
    order = unordered(chosen) if is_small(x) else expert_order(chosen, len(experts.downs))
    activations = grouped_linear(
        x,
        experts.gates_ups,
        order,
        pairs_per_row=chosen.shape[1],
        biases=None if experts.clamped is None else experts.clamped.biases,
        gate=experts.clamped or SILU,
    )
    return grouped_linear(activations, experts.downs, order, biases=experts.down_biases if biased else None)
