"""Matrices of 8-bit numbers with scales (`engine.dtype: fp8`); KV has such numbers without (`engine.kv_dtype: fp8`)."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

F8 = torch.float8_e4m3fn
F8_MAX = 448.0
LEAST_SCALE = 1e-12  # of a row of zeros


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A weight [n, k], or of experts [experts, n, k]. Neighbours in a row share a scale, as many as `group` says."""

    values: Tensor  # float8_e4m3fn
    scales: Tensor  # float32, [n, k // group]

    @property
    def group(self) -> int:
        return self.values.shape[-1] // self.scales.shape[-1]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def view(self, experts: int, rows: int, columns: int) -> "Fp8Matrix":
        return Fp8Matrix(self.values.view(experts, rows, columns), self.scales.view(experts, rows, -1))

    def split(self, rows: int | list[int]) -> list["Fp8Matrix"]:
        pairs = zip(torch.split(self.values, rows), torch.split(self.scales, rows), strict=True)
        return [Fp8Matrix(*pair) for pair in pairs]

    def __getitem__(self, expert: int) -> "Fp8Matrix":
        return Fp8Matrix(self.values[expert], self.scales[expert])

    def products(self) -> Tensor:
        """What the numbers stand for, in float32."""
        groups = self.values.float().reshape(*self.scales.shape, -1)
        return (groups * self.scales[..., None]).flatten(-2)

    def copy_to(self, weight: "Weight") -> None:
        if isinstance(weight, Tensor):
            weight.copy_(self.products())
            return
        weight.values.copy_(self.values)
        weight.scales.copy_(self.scales)


Weight: TypeAlias = Tensor | Fp8Matrix


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.products().to(dtype)


def operands(weight: Weight, stand_in: Tensor) -> tuple[Tensor, Tensor, int]:
    """Values, scales and group for a kernel. A plain weight has no group, and a stand-in for scales."""
    return (weight, stand_in, 0) if isinstance(weight, Tensor) else (weight.values, weight.scales, weight.group)


def rounded(values: Tensor, group: int) -> Fp8Matrix:
    """[n, k] in 8 bits. The largest number of a group becomes F8_MAX."""
    groups = values.float().reshape(len(values), -1, group)
    scales = (groups.abs().amax(-1) / F8_MAX).clamp_(min=LEAST_SCALE)
    return Fp8Matrix((groups / scales[..., None]).flatten(1).to(F8), scales)
