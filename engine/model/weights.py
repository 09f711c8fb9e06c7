"""The tensors of a model folder, memory-mapped. Models take them by name; neighbours are fused without a copy.

Because all workers of a machine map the same files, the weights are in memory once. A .safetensors file is 8 bytes of
header length (little-endian), a JSON header `name -> {dtype, shape, data_offsets}`, and the data.
"""

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from engine.model.shard import Part, Shard
from runtime.checkpoint.model_files import weight_files
from runtime.device.driver import MemoryDriver
from runtime.device.memory_range import MemoryRange, padded_bytes
from runtime.errors import ModelError

_PROGRESS_INTERVAL_S = 2.0

log = structlog.get_logger()

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a tensor lies: bytes [start, end) of `data`, a mapped file; with `columns`, only those of each row."""

    data: Tensor  # uint8, one-dimensional
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    columns: range | None = None

    def follows(self, other: "_Entry") -> bool:
        return self.data is other.data and self.dtype == other.dtype and self.start == other.end

    def cut(self, part: Part | None) -> "_Entry":
        """The part that a rank holds."""
        if part is None:
            return self
        held, shape = part.held, list(self.shape)
        shape[part.dimension] = len(held)
        if part.dimension:
            return dataclasses.replace(self, shape=tuple(shape), columns=held)
        row = (self.end - self.start) // self.shape[0]
        start, end = self.start + held.start * row, self.start + held.stop * row
        return dataclasses.replace(self, shape=tuple(shape), start=start, end=end)


class TensorSource:
    """Where a model takes its tensors from, each once: a folder, or random numbers."""

    memory: MemoryRange | None = None  # that holds the tensors, unless they lie in mapped files

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, which must be of that shape. Raises ModelError."""
        return self.take_fused({name: shape})

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        """Several tensors stacked along their first dimension. Raises ModelError."""
        raise NotImplementedError

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises ModelError when there are tensors that the model did not take."""

    def reload(self) -> None:
        """Puts the values back into the tensors that were taken, after `memory` was given back and taken again."""


class Weights(TensorSource):
    """A folder's tensors, or the parts of them that `shard` holds."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, driver: MemoryDriver | None = None, shard: Shard | None = None
    ) -> None:
        """`driver`: of the device whose memory the tensors are copied to; None: the CPU computes on the mapped files.
        Raises ModelError when a file is missing or malformed, UnavailableError when there is no room."""
        self._shard = shard
        self._model = str(folder)
        self._dtype = dtype
        self._entries: dict[str, _Entry] = {}
        for path in weight_files(folder):
            self._entries |= _map(path)
        self._loaded_bytes = 0
        self._told_s = time.monotonic()
        self._placed: list[tuple[Tensor, _Entry]] = []  # in `memory`
        if driver is not None:
            sizes = (self._num_elements(name, entry) * dtype.itemsize for name, entry in self._entries.items())
            self.memory = MemoryRange(driver, sum(map(padded_bytes, sizes)))

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        """Stacked tensors; a view of the file where they are neighbours in it and the CPU computes on it."""
        entries = [self._pop(name, shape) for name, shape in shapes.items()]
        first, last = entries[0], entries[-1]
        rows = sum(entry.shape[0] for entry in entries)
        if self.memory is not None:
            fused = self.memory.tensor((rows, *first.shape[1:]), self._dtype)
            for part, entry in zip(torch.split(fused, [entry.shape[0] for entry in entries]), entries, strict=True):
                part.copy_(self._load(entry))
                self._placed.append((part, entry))
            self._tell(fused.nbytes, self.memory.nbytes)
            return fused
        if all(entry.follows(before) for before, entry in itertools.pairwise(entries)):
            whole = dataclasses.replace(first, shape=(rows, *first.shape[1:]), end=last.end)
            return self._load(whole).to(self._dtype).contiguous()
        return torch.cat([self._load(entry).to(self._dtype) for entry in entries])

    def finish(self, ignored: Iterable[str] = ()) -> None:
        left = sorted(
            name
            for name in self._entries.keys() - set(ignored)
            if not name.endswith("rotary_emb.inv_freq")  # a table that early Llama checkpoints stored
        )
        if left:
            raise ModelError(self._model, f"{len(left)} tensors are not known to this architecture: {_listed(left)}")

    def reload(self) -> None:
        for part, entry in self._placed:
            part.copy_(self._load(entry))

    def _pop(self, name: str, shape: tuple[int, ...]) -> _Entry:
        entry = self._entries.pop(name, None)
        if entry is None:
            raise ModelError(self._model, f"tensor {name} is missing")
        part = self._part(name)
        if part is not None:
            shape = (*shape[: part.dimension], part.whole, *shape[part.dimension + 1 :])
        if entry.shape != shape:
            raise ModelError(self._model, f"tensor {name} has shape {list(entry.shape)}, expected {list(shape)}")
        return entry.cut(part)

    def _part(self, name: str) -> Part | None:
        return None if self._shard is None else self._shard.part(name)

    def _num_elements(self, name: str, entry: _Entry) -> int:
        part = self._part(name)
        elements = math.prod(entry.shape)
        return elements if part is None else elements // part.whole * len(part.held)

    def _tell(self, nbytes: int, total: int) -> None:
        """Logs progress every few seconds, because many GB take a while on their way to a GPU."""
        self._loaded_bytes += nbytes
        if time.monotonic() - self._told_s >= _PROGRESS_INTERVAL_S:
            self._told_s = time.monotonic()
            log.info("loading weights", model=self._model, mib=self._loaded_bytes >> 20, of_mib=total >> 20)

    def _load(self, entry: _Entry) -> Tensor:
        data = entry.data[entry.start : entry.end]
        if data.storage_offset() % entry.dtype.itemsize:  # early writers did not align tensors
            data = data.clone()
        tensor = data.view(entry.dtype)
        if entry.columns is None:
            return tensor.view(entry.shape)
        return tensor.view(entry.shape[0], -1)[:, entry.columns.start : entry.columns.stop]


def _map(path: Path) -> dict[str, _Entry]:
    """The file's tensors. Because the private mapping is never written, its pages are those of the page cache."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > size - 8:
                raise ModelError(str(path), "is truncated or not a safetensors file")
            header = json.loads(file.read(header_bytes))
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        header.pop("__metadata__", None)
        return {name: _entry(data, 8 + header_bytes, fields) for name, fields in header.items()}
    except OSError as error:
        raise ModelError(str(path), f"cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(str(path), f"is not a safetensors file that can be used: {error!r}") from error


def _entry(data: Tensor, base: int, fields: dict[str, Any]) -> _Entry:
    """Raises ValueError, KeyError or TypeError when the header's fields do not fit together."""
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"dtype {fields['dtype']} is not supported")
    dtype, shape = DTYPES[fields["dtype"]], tuple(fields["shape"])
    start, end = (base + offset for offset in fields["data_offsets"])
    if not base <= start <= end <= data.numel() or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {fields['data_offsets']} do not fit shape {list(shape)} and the file's size")
    return _Entry(data, dtype, shape, start, end)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
