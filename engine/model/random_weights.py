"""Weights made on the device, for measurements: no file is read.

Norms are near one, and projections keep the scale of their input. Ranks with the same seed make the same numbers:
tensors that every rank holds whole are equal, but the parts do not add up to one model.
"""

import torch
from torch import Tensor

from engine.model.families.registry import MODELS
from engine.model.fp8_matrix import F8, Fp8Matrix, Weight, rounded
from engine.model.operations import TorchOperations
from engine.model.shard import Shard
from engine.model.weights import TensorSource
from runtime.device.driver import MemoryDriver
from runtime.device.memory_range import MemoryRange, padded_bytes

_ROWS_AT_ONCE = 8192  # that are drawn in float32


class RandomWeights(TensorSource):
    def __init__(
        self, shard: Shard, dtype: torch.dtype, driver: MemoryDriver, seed: int = 0, *, fp8: bool = False
    ) -> None:
        """fp8: projections are kept in 8 bits."""
        shapes = _Shapes(dtype, fp8)
        MODELS[shard.config.architecture](shard.config, shapes, TorchOperations(), shard.vocabulary)
        self.memory = self._range = MemoryRange(driver, shapes.nbytes)
        self.dtype = dtype
        self._fp8 = fp8
        self._seed = seed
        self._generator = torch.Generator(self._range.bytes().device).manual_seed(seed)
        self._placed: list[tuple[Weight, float, float]] = []  # with mean and deviation

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        shape = _stacked(shapes)
        values = self._range.tensor(shape, self.dtype)
        is_table = any("embed_tokens" in name for name in shapes)
        deviation = 0.1 if len(shape) == 1 else 1.0 if is_table else shape[-1] ** -0.5
        self._placed.append((values, float(len(shape) == 1), deviation))
        self._draw(*self._placed[-1])
        return values

    def take_matrices(self, shapes: dict[str, tuple[int, int]]) -> Weight:
        if not self._fp8:
            return self.take_fused(dict(shapes))
        rows, columns = _stacked(dict(shapes))
        scales = self._range.tensor((rows, 1), torch.float32)
        matrix = Fp8Matrix(self._range.tensor((rows, columns), F8), scales)
        self._placed.append((matrix, 0.0, columns**-0.5))
        self._draw(*self._placed[-1])
        return matrix

    def _draw(self, weight: Weight, mean: float, deviation: float) -> None:
        if isinstance(weight, Tensor):
            weight.normal_(mean, deviation, generator=self._generator)
            return
        for part in weight.split(_ROWS_AT_ONCE):
            numbers = torch.empty(part.shape, device=part.device)
            rounded(numbers.normal_(mean, deviation, generator=self._generator), part.group).copy_to(part)

    def fingerprint(self) -> str:
        return f"random-{self._seed}" + ("-fp8" if self._fp8 else "")

    def reload(self) -> None:
        self._generator.manual_seed(self._seed)
        for placed in self._placed:
            self._draw(*placed)


class _Shapes(TensorSource):
    """Tensors without values: counts the bytes that a model takes."""

    def __init__(self, dtype: torch.dtype, fp8: bool) -> None:
        self.nbytes = 0
        self.dtype = dtype
        self._fp8 = fp8

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        values = torch.empty(_stacked(shapes), dtype=self.dtype, device="meta")
        self.nbytes += padded_bytes(values.nbytes)
        return values

    def take_matrices(self, shapes: dict[str, tuple[int, int]]) -> Weight:
        if not self._fp8:
            return self.take_fused(dict(shapes))
        rows, columns = _stacked(dict(shapes))
        self.nbytes += padded_bytes(rows * columns) + padded_bytes(rows * torch.float32.itemsize)
        return torch.empty(rows, columns, dtype=F8, device="meta")


def _stacked(shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    first = next(iter(shapes.values()))
    return (sum(shape[0] for shape in shapes.values()), *first[1:])
