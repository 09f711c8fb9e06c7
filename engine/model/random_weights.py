"""Weights made on the device, for measurements: no file is read.

Norms are near one, projections keep the input's scale. Ranks with the same seed make the same numbers, so what they all
hold is the same; a shard is not one of a whole.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.model.operations import TorchOperations
from engine.model.registry import MODELS
from engine.model.shard import Shard
from runtime.device.driver import MemoryDriver
from runtime.device.memory_range import MemoryRange, padded_bytes


class RandomWeights:
    """Implements `engine.model.weights.TensorSource`."""

    def __init__(self, shard: Shard, dtype: torch.dtype, driver: MemoryDriver, seed: int = 0) -> None:
        shapes = _Shapes(dtype)
        MODELS[shard.config.architecture](shard.config, shapes, TorchOperations(), shard.vocabulary)
        self.memory: MemoryRange | None = MemoryRange(driver, shapes.nbytes)
        self._range = self.memory
        self._dtype = dtype
        self._seed = seed
        self._generator = torch.Generator(self._range.bytes().device).manual_seed(seed)
        self._placed: list[tuple[Tensor, float, float]] = []  # with mean and deviation

    def take(self, name: str, *shape: int) -> Tensor:
        values = self._range.tensor(shape, self._dtype)
        deviation = 0.1 if len(shape) == 1 else 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        self._placed.append((values, float(len(shape) == 1), deviation))
        return values.normal_(*self._placed[-1][1:], generator=self._generator)

    def reload(self) -> None:
        self._generator.manual_seed(self._seed)
        for values, mean, deviation in self._placed:
            values.normal_(mean, deviation, generator=self._generator)

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        rows = sum(shape[0] for shape in shapes.values())
        first = next(iter(shapes.values()))
        return self.take("+".join(shapes), rows, *first[1:])

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Nothing can be left over."""


class _Shapes:
    """Implements `TensorSource` with tensors that have no values: it adds up what a model takes."""

    memory: MemoryRange | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.nbytes = 0
        self._dtype = dtype

    def take(self, name: str, *shape: int) -> Tensor:
        values = torch.empty(shape, dtype=self._dtype, device="meta")
        self.nbytes += padded_bytes(values.nbytes)
        return values

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        return torch.cat([self.take(name, *shape) for name, shape in shapes.items()])

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Nothing can be left over."""

    def reload(self) -> None:
        """There is nothing to put anywhere."""
