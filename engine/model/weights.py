"""The tensors of a model folder, memory-mapped. Models take them by name; neighbours are fused without a copy.

Because all workers of a machine map the same files, the weights are in memory once.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import structlog
import torch
import xxhash
from torch import Tensor

from engine.model.mapped_file import Entry, MappedFile, map_file
from engine.model.shard import Part, Shard
from runtime.checkpoint.model_files import weight_files
from runtime.device.driver import MemoryDriver
from runtime.device.memory_range import MemoryRange, padded_bytes
from runtime.errors import ModelError

_PROGRESS_INTERVAL_S = 2.0

log = structlog.get_logger()

HASHING_THREADS = 4  # of one worker; a thread hashes 10 GB/s


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

    def fingerprint(self) -> str:
        """Names the values: sources with one fingerprint have the same tensors."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raises ModelError when reload() would not find what was loaded."""

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
        self._folder = folder
        self._model = str(folder)
        self._dtype = dtype
        self._entries: dict[str, Entry] = {}
        self._files = [map_file(path) for path in weight_files(folder)]
        for file in self._files:
            self._entries |= file.entries
        self._hashes: list[Future[str]] = []  # of the files; none: not asked for
        self._loaded_bytes = 0
        self._told_s = time.monotonic()
        self._placed: list[tuple[Tensor, Entry]] = []  # in `memory`
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

    def start_hashing(self) -> None:
        """Hashes all files, beside what loads them."""
        threads = ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hash-weights")
        self._hashes = [threads.submit(file.content_hash) for file in self._files]
        threads.shutdown(wait=False)

    def fingerprint(self) -> str:
        if not self._hashes:
            self.start_hashing()
        return xxhash.xxh3_128_hexdigest("".join(one.result() for one in self._hashes).encode())

    def check_unchanged(self) -> None:
        """Maps files anew that were written or replaced. Raises ModelError when their content is another; unless
        fingerprint() was asked for, it cannot tell."""
        if weight_files(self._folder) != [file.path for file in self._files]:
            raise self._changed("the folder names other files")
        for place, file in enumerate(self._files):
            if file.is_current:
                continue
            fresh = map_file(file.path)
            if self._hashes and fresh.content_hash() != self._hashes[place].result():
                raise self._changed(f"{file.path.name}: {_change(file, fresh)}")
            self._files[place] = fresh
            self._placed = [
                (part, dataclasses.replace(entry, data=fresh.data) if entry.data is file.data else entry)
                for part, entry in self._placed
            ]

    def reload(self) -> None:
        self.check_unchanged()
        for part, entry in self._placed:
            part.copy_(self._load(entry))

    def _changed(self, what: str) -> ModelError:
        problem = f"the weights on disk are not those that were loaded: {what}. Put the loaded ones back"
        return ModelError(self._model, f"{problem}, or restart the worker to serve the new ones")

    def _pop(self, name: str, shape: tuple[int, ...]) -> Entry:
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

    def _num_elements(self, name: str, entry: Entry) -> int:
        part = self._part(name)
        elements = math.prod(entry.shape)
        return elements if part is None else elements // part.whole * len(part.held)

    def _tell(self, nbytes: int, total: int) -> None:
        """Logs progress every few seconds, because many GB take a while on their way to a GPU."""
        self._loaded_bytes += nbytes
        if time.monotonic() - self._told_s >= _PROGRESS_INTERVAL_S:
            self._told_s = time.monotonic()
            log.info("loading weights", model=self._model, mib=self._loaded_bytes >> 20, of_mib=total >> 20)

    def _load(self, entry: Entry) -> Tensor:
        data = entry.data[entry.start : entry.end]
        if data.storage_offset() % entry.dtype.itemsize:  # early writers did not align tensors
            data = data.clone()
        tensor = data.view(entry.dtype)
        if entry.columns is None:
            return tensor.view(entry.shape)
        return tensor.view(entry.shape[0], -1)[:, entry.columns.start : entry.columns.stop]


def _change(old: MappedFile, new: MappedFile) -> str:
    shapes, others = ({name: (one.dtype, one.shape) for name, one in file.entries.items()} for file in (old, new))
    if names := sorted(name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name)):
        return f"{len(names)} tensors are new, missing, or of another shape or dtype: {_listed(names)}"
    return "its tensors have other values"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
