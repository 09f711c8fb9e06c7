"""Weights made on the device, for measurements: no file is read.

Norms are near one, projections keep the input's scale. Ranks with the same seed make the same numbers, so what they all
hold is the same; a shard is not one of a whole.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.models.registry import MODELS
from engine.operations import TorchOperations
from engine.shard import Shard
from kvtransfer.memory_driver import MemoryDriver
from kvtransfer.memory_range import MemoryRange, padded_bytes


class RandomWeights:
    """Implements `engine.weights.TensorSource`."""

    def __init__(self, shard: Shard, dtype: torch.dtype, driver: MemoryDriver, seed: int = 0) -> None:
        shapes = _Shapes(dtype)
        MODELS[shard.config.architecture](shard.config, shapes, TorchOperations(), shard.vocabulary)
        self.memory: MemoryRange | None = MemoryRange(driver, shapes.nbytes)
        self._range = self.memory
        self._dtype = dtype
        self._generator = torch.Generator(self._range.bytes().device).manual_seed(seed)

    def take(self, name: str, *shape: int) -> Tensor:
        values = self._range.tensor(shape, self._dtype)
        if len(shape) == 1:
            return values.normal_(1, 0.1, generator=self._generator)
        scale = 1.0 if "embed_tokens" in name else shape[-1] ** -0.5
        return values.normal_(0, scale, generator=self._generator)

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        rows = sum(shape[0] for shape in shapes.values())
        first = next(iter(shapes.values()))
        return self.take("+".join(shapes), rows, *first[1:])

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Nothing can be left over."""


class _Shapes:
    """Implements `engine.weights.TensorSource` with tensors that have no values: it adds up what a model takes."""

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
