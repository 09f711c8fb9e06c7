"""Weights made on the device, for measurements: no file is read.

Norms are near one, and projections keep the scale of their input. Ranks with the same seed make the same numbers:
tensors that every rank holds whole are equal, but the parts do not add up to one model.
"""

import torch
from torch import Tensor

from engine.model.families.registry import MODELS
from engine.model.operations import TorchOperations
from engine.model.shard import Shard
from engine.model.weights import TensorSource
from runtime.device.driver import MemoryDriver
from runtime.device.memory_range import MemoryRange, padded_bytes


class RandomWeights(TensorSource):
    def __init__(self, shard: Shard, dtype: torch.dtype, driver: MemoryDriver, seed: int = 0) -> None:
        shapes = _Shapes(dtype)
        MODELS[shard.config.architecture](shard.config, shapes, TorchOperations(), shard.vocabulary)
        self.memory = self._range = MemoryRange(driver, shapes.nbytes)
        self._dtype = dtype
        self._seed = seed
        self._generator = torch.Generator(self._range.bytes().device).manual_seed(seed)
        self._placed: list[tuple[Tensor, float, float]] = []  # with mean and deviation

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        shape = _stacked(shapes)
        values = self._range.tensor(shape, self._dtype)
        is_table = any("embed_tokens" in name for name in shapes)
        deviation = 0.1 if len(shape) == 1 else 1.0 if is_table else shape[-1] ** -0.5
        self._placed.append((values, float(len(shape) == 1), deviation))
        return values.normal_(*self._placed[-1][1:], generator=self._generator)

    def fingerprint(self) -> str:
        return f"random-{self._seed}"

    def reload(self) -> None:
        self._generator.manual_seed(self._seed)
        for values, mean, deviation in self._placed:
            values.normal_(mean, deviation, generator=self._generator)


class _Shapes(TensorSource):
    """Tensors without values: counts the bytes that a model takes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.nbytes = 0
        self._dtype = dtype

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        values = torch.empty(_stacked(shapes), dtype=self._dtype, device="meta")
        self.nbytes += padded_bytes(values.nbytes)
        return values


def _stacked(shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    first = next(iter(shapes.values()))
    return (sum(shape[0] for shape in shapes.values()), *first[1:])
