"""One .safetensors file, mapped: where its tensors lie, and whether it is still what was mapped.

Such a file is 8 bytes of header length (little-endian), a JSON header `name -> {dtype, shape, data_offsets}`, and the
data.
"""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from engine.model.shard import Part
from runtime.errors import ModelError

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: bytes [start, end) of `data`, a mapped file; with `parts`, only the part of them that is
    left when one after the other is cut. With `scale` its values are the products of both."""

    data: Tensor  # uint8, one-dimensional
    dtype: torch.dtype
    shape: tuple[int, ...]  # of what is left
    start: int
    end: int
    parts: tuple[Part, ...] = ()
    scale: "Scale | None" = None

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape before parts were cut."""
        shape = self.shape
        for part in reversed(self.parts):
            shape = part.uncut(shape)
        return shape

    def follows(self, other: "Entry") -> bool:
        is_plain = self.scale is None and other.scale is None and self.dtype == other.dtype
        return is_plain and self.data is other.data and self.start == other.end

    def cut(self, part: Part | None) -> "Entry":
        """The part that a rank holds."""
        if part is None:
            return self
        held, shape = part.held, list(self.shape)
        shape[part.dimension] = len(held)
        if part.dimension or self.parts or self.scale is not None:
            return dataclasses.replace(self, shape=tuple(shape), parts=(*self.parts, part))
        row = (self.end - self.start) // self.shape[0]
        start, end = self.start + held.start * row, self.start + held.stop * row
        return dataclasses.replace(self, shape=tuple(shape), start=start, end=end)

    def moved(self, old: Tensor, new: Tensor) -> "Entry":
        """The same in the mapping `new`, where this one is in `old`."""
        scale = self.scale and dataclasses.replace(self.scale, entry=self.scale.entry.moved(old, new))
        return dataclasses.replace(self, data=new if self.data is old else self.data, scale=scale)


@dataclass(frozen=True, slots=True)
class Scale:
    """What the values of a matrix are multiplied with: [], [1], [rows, 1] or one for each block; of matrices in MXFP4
    exponents, [experts, rows, groups]."""

    entry: Entry
    block: tuple[int, int] | None  # rows and columns of a block


@dataclass(frozen=True, slots=True)
class MappedFile:
    """The private mapping's pages are those of the page cache, except where a CPU's weights were replaced in place."""

    path: Path
    stamp: tuple[int, ...]  # of the file when it was mapped; see _stamp
    data: Tensor  # uint8, the whole file
    entries: dict[str, Entry]

    @property
    def is_current(self) -> bool:
        """Whether the path still names the file that is mapped, with no write to it since."""
        try:
            return _stamp(self.path) == self.stamp
        except OSError:
            return False

    def content_hash(self) -> str:
        """The hash of all bytes, header and data; 0.1 s per GB. Other threads run meanwhile."""
        return xxhash.xxh3_128_hexdigest(self.data.numpy().data)


def map_file(path: Path) -> MappedFile:
    """Raises ModelError."""
    try:
        stamp, size = _stamp(path), path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > size - 8:
                raise ModelError(str(path), "is truncated or not a safetensors file")
            header = json.loads(file.read(header_bytes))
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        header.pop("__metadata__", None)
        entries = {name: _entry(data, 8 + header_bytes, fields) for name, fields in header.items()}
        return MappedFile(path, stamp, data, entries)
    except OSError as error:
        raise ModelError(str(path), f"cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ModelError(str(path), f"is not a safetensors file that can be used: {error!r}") from error


def _stamp(path: Path) -> tuple[int, ...]:
    """Differs after every write to the file, and when another file has its name."""
    status = os.stat(path)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _entry(data: Tensor, base: int, fields: dict[str, Any]) -> Entry:
    """Raises ValueError, KeyError or TypeError when the header's fields do not fit together."""
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"dtype {fields['dtype']} is not supported")
    dtype, shape = DTYPES[fields["dtype"]], tuple(fields["shape"])
    start, end = (base + offset for offset in fields["data_offsets"])
    if not base <= start <= end <= data.numel() or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {fields['data_offsets']} do not fit shape {list(shape)} and the file's size")
    return Entry(data, dtype, shape, start, end)
