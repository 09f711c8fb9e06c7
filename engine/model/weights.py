"""The tensors of a model folder, memory-mapped. Models take them by name; neighbours are fused without a copy.

Because all workers of a machine map the same files, the weights are in memory once.
"""

import dataclasses
import itertools
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from engine.model import fp8_entry
from engine.model.checkpoint import Checkpoint, cut, loaded
from engine.model.fp8_matrix import F8, Fp8Matrix, Weight
from engine.model.fused_tensors import parts_of
from engine.model.mapped_file import Entry, MappedFile, map_file
from engine.model.scaled_tensors import QUANTIZED
from engine.model.shard import Part, Shard
from runtime.checkpoint.model_config import ModelConfig, load_model_config
from runtime.checkpoint.model_files import weight_files
from runtime.device.driver import MemoryDriver
from runtime.device.memory_range import MemoryRange, padded_bytes
from runtime.errors import ModelError

_PROGRESS_INTERVAL_S = 2.0

log = structlog.get_logger()


class TensorSource:
    """Where a model takes its tensors from, each once: a folder, or random numbers."""

    dtype: torch.dtype  # of all tensors that are not in 8 bits
    memory: MemoryRange | None = None  # that holds the tensors, unless they lie in mapped files

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`, which must be of that shape. Raises ModelError."""
        return self.take_fused({name: shape})

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        """Several tensors stacked along their first dimension. Raises ModelError."""
        raise NotImplementedError

    def take_matrices(self, shapes: dict[str, tuple[int, int]]) -> Weight:
        """As take_fused, for what `Operations` multiplies with; perhaps in 8 bits. Raises ModelError."""
        return self.take_fused(dict(shapes))

    def take_matrix(self, name: str, rows: int, columns: int) -> Weight:
        return self.take_matrices({name: (rows, columns)})

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raises ModelError when there are tensors that the model did not take."""

    def fingerprint(self) -> str:
        """Names the values: sources with one fingerprint have the same tensors."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raises ModelError when reload() would not find what was loaded."""

    @property
    def can_reload(self) -> bool:
        """Whether reload() would find what is there now."""
        return False

    def reload(self) -> None:
        """Puts the values back into the tensors that were taken, after `memory` was given back and taken again."""

    # --- other values, from outside -----------------------------------------------------------------------------------

    def derived(self, compute: Callable[[], Tensor]) -> Tensor:
        """A tensor of its own that is computed from taken ones, and again when their values are replaced."""
        return compute()

    @property
    def problem(self) -> str:
        """Why nothing may be computed with the present values; empty when it may."""
        return ""

    def begin_update(self) -> None:
        """Between this and `end_update` every tensor is to be replaced. Raises ModelError when none can be."""
        raise ModelError("", "these weights cannot be replaced")

    def parts(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """The tensors of the model that a tensor of the checkpoint consists of, for `check` and `replace`. Raises
        ModelError when it has other rows than they."""
        return ((name, tensor),)

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises ModelError, with nothing changed, when `replace` cannot take the tensor."""

    def replace(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor of the checkpoint, whole and under its name there, to where the model has it or its part."""

    def end_update(self) -> None:
        """Raises ModelError when tensors were left out."""

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raises ModelError, with nothing changed, when `read` cannot take the checkpoint."""
        raise ModelError("", "these weights cannot be replaced")

    def read(self, checkpoint: Checkpoint) -> None:
        """An update with all tensors of a checkpoint that fits. Raises ModelError when its files change meanwhile."""

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Makes the checkpoint's values those that reload() puts into the tensors."""


class Weights(TensorSource):
    """A folder's tensors, or the parts of them that `shard` holds."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        driver: MemoryDriver | None = None,
        shard: Shard | None = None,
        *,
        fp8: bool = False,
        keeps_fp8: bool = False,
    ) -> None:
        """`driver`: of the device whose memory the tensors are copied to; None: the CPU computes on the mapped files.
        `fp8`: projections have the values of 8-bit numbers; `keeps_fp8`: they are in memory as such. Raises ModelError
        when a file is missing or malformed, UnavailableError when there is no room."""
        self._shard = shard
        self._model = str(folder)
        self.dtype = dtype
        self._checkpoint = Checkpoint(folder)
        self._entries = self._checkpoint.entries  # that the model has not taken
        self._loaded_bytes = 0
        self._told_s = time.monotonic()
        self._placed: dict[str, tuple[Weight, Entry]] = {}  # what the model has, by name
        self._fp8 = fp8
        self._keeps_fp8 = keeps_fp8
        self._groups = {name: self._group(name, entry) for name, entry in self._entries.items()} if fp8 else {}
        self._ignored: set[str] = set()
        self._derived: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self._replaced: set[str] = set()  # in this update
        self._given = ""  # the fingerprint of values that are not the folder's
        self._problem = ""
        if driver is not None:
            self.memory = MemoryRange(
                driver, sum(self._num_bytes(name, entry) for name, entry in self._entries.items())
            )

    def take_fused(self, shapes: dict[str, tuple[int, ...]]) -> Tensor:
        """Stacked tensors; a view of the file where they are neighbours in it and the CPU computes on it."""
        entries = [self._pop(name, shape) for name, shape in shapes.items()]
        fused = self._fused(entries)
        parts = torch.split(fused, [entry.shape[0] for entry in entries])
        self._placed |= zip(shapes, zip(parts, entries, strict=True), strict=True)
        return fused

    def take_matrices(self, shapes: dict[str, tuple[int, int]]) -> Weight:
        groups = {self._groups.get(name, 0) for name in shapes}
        if groups == {0}:
            return self.take_fused(dict(shapes))
        if len(groups) > 1:
            problem = f"fp8 needs tensors that are multiplied together in blocks of one size: {_listed(list(shapes))}"
            raise ModelError(self._model, problem)
        entries = [self._pop(name, shape) for name, shape in shapes.items()]
        rows = [entry.shape[0] for entry in entries]
        matrix = self._new_matrix(sum(rows), entries[0].shape[1], groups.pop())
        parts: Iterable[Weight] = matrix.split(rows)
        for name, part, entry in zip(shapes, parts, entries, strict=True):
            self._placed[name] = part, entry
            self._fill(name, entry)
            if self.memory is not None:
                self._tell(part.nbytes, self.memory.nbytes)
        return matrix

    def _new_matrix(self, rows: int, columns: int, group: int) -> Weight:
        if self.memory is None:
            return torch.empty(rows, columns, dtype=self.dtype)
        if not self._keeps_fp8:
            return self.memory.tensor((rows, columns), self.dtype)
        values = self.memory.tensor((rows, columns), F8)
        return Fp8Matrix(values, self.memory.tensor((rows, columns // group), torch.float32))

    @torch.no_grad()
    def _fill(self, name: str, entry: Entry) -> None:
        """Copies a tensor of a checkpoint, or the part of it that is held here, to where the model has it."""
        weight = self._placed[name][0]
        if group := self._groups.get(name, 0):
            fp8_entry.read(entry, group, weight.device).copy_to(weight)
        elif isinstance(weight, Tensor):
            weight.copy_(loaded(entry))

    def _fused(self, entries: list[Entry]) -> Tensor:
        first, last = entries[0], entries[-1]
        rows = sum(entry.shape[0] for entry in entries)
        if self.memory is not None:
            fused = self.memory.tensor((rows, *first.shape[1:]), self.dtype)
            for part, entry in zip(torch.split(fused, [entry.shape[0] for entry in entries]), entries, strict=True):
                part.copy_(loaded(entry))
            self._tell(fused.nbytes, self.memory.nbytes)
            return fused
        if all(entry.follows(before) for before, entry in itertools.pairwise(entries)):
            whole = dataclasses.replace(first, shape=(rows, *first.shape[1:]), end=last.end)
            return loaded(whole).to(self.dtype).contiguous()
        return torch.cat([loaded(entry).to(self.dtype) for entry in entries])

    def finish(self, ignored: Iterable[str] = ()) -> None:
        self._ignored = set(ignored)
        left = sorted(name for name in self._entries if not self._is_ignored(name))
        if left:
            raise ModelError(self._model, f"{len(left)} tensors are not known to this architecture: {_listed(left)}")

    def _is_ignored(self, name: str) -> bool:
        return name in self._ignored or name.endswith("rotary_emb.inv_freq")  # a table of early Llama checkpoints

    def start_hashing(self) -> None:
        """Hashes all files, beside what loads them."""
        self._checkpoint.start_hashing()

    def fingerprint(self) -> str:
        return (self._given or self._checkpoint.fingerprint()) + ("-fp8" if self._fp8 else "")

    def check_unchanged(self) -> None:
        """Maps files anew that were written or replaced. Raises ModelError when their content is another; unless
        fingerprint() was asked for, it cannot tell. What was given from outside is not compared."""
        if self._given:
            return
        known = self._checkpoint
        if weight_files(known.folder) != [file.path for file in known.files]:
            raise self._changed("the folder names other files")
        for place, file in enumerate(known.files):
            if file.is_current:
                continue
            fresh = map_file(file.path)
            if known.hashes and fresh.content_hash() != known.hashes[place].result():
                raise self._changed(f"{file.path.name}: {_change(file, fresh)}")
            known.files[place] = fresh
            self._placed = {
                name: (part, entry.moved(file.data, fresh.data)) for name, (part, entry) in self._placed.items()
            }

    def reload(self) -> None:
        self.check_unchanged()
        if self._given:
            self._problem = "the weights that were given are gone with a sleep of level 2: give them again"
            return
        for name, (_, entry) in self._placed.items():
            self._fill(name, entry)
        self._derive()

    def derived(self, compute: Callable[[], Tensor]) -> Tensor:
        tensor = compute()
        self._derived.append((tensor, compute))
        return tensor

    @property
    def can_reload(self) -> bool:
        try:
            self.check_unchanged()
        except ModelError:
            return False
        return not self._given

    @property
    def problem(self) -> str:
        return self._problem

    def begin_update(self) -> None:
        self._replaced = set()

    def parts(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        parts = {} if self._shard is None else parts_of(name, self._shard.model)
        if not parts:
            return ((name, tensor),)
        _check_shape(self._model, name, tuple(tensor.shape[:1]), (sum(parts.values()),))
        return zip(parts, torch.split(tensor, list(parts.values())), strict=True)

    def check(self, name: str, tensor: Tensor) -> None:
        self._check(self._model, name, tensor)

    def _check(self, model: str, name: str, tensor: Tensor) -> None:
        if name not in self._placed:
            if self._is_ignored(name):
                return
            raise ModelError(model, f"tensor {name} is not known to this architecture")
        _check_shape(model, name, tuple(tensor.shape), self._whole(name, tuple(self._placed[name][0].shape)))
        if not tensor.is_floating_point() or tensor.dtype in QUANTIZED:
            raise ModelError(model, f"tensor {name} has dtype {tensor.dtype}, expected floating-point numbers")

    @torch.no_grad()
    def replace(self, name: str, tensor: Tensor) -> None:
        if self._is_ignored(name):
            return
        part, weight = self._part(name), self._placed[name][0]
        self._note(name)
        if group := self._groups.get(name, 0):
            fp8_entry.rounded_part(tensor.to(weight.device), group, part).copy_to(weight)
        elif isinstance(weight, Tensor):
            weight.copy_(cut(tensor, part))

    def _note(self, name: str) -> None:
        """Before a tensor is replaced."""
        self._problem = "only some tensors are replaced: update the weights again, with all of them"
        self._given = self._given if self._replaced else f"given-{secrets.token_hex(16)}"
        self._replaced.add(name)

    @torch.no_grad()
    def end_update(self) -> None:
        _check_complete(self._model, self._placed.keys() - self._replaced)
        self._derive()
        self._problem = ""

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        model = str(checkpoint.folder)
        self._check_config(model, load_model_config(checkpoint.folder))
        for name, tensor in checkpoint.tensors():
            self._check(model, name, tensor)
        _check_complete(model, self._placed.keys() - checkpoint.entries)

    def _check_config(self, model: str, config: ModelConfig) -> None:
        """`dtype` may differ, because values are converted to the one that is served."""
        if self._shard is None:
            return
        ours, theirs = dataclasses.asdict(self._shard.model), dataclasses.asdict(config)
        for field, value in _leaves(ours).items():
            if field != "dtype" and (there := _leaves(theirs).get(field)) != value:
                raise ModelError(model, f"config.json says {field} {there}, and {value} is served")

    def read(self, checkpoint: Checkpoint) -> None:
        self.begin_update()
        for name, entry in checkpoint.entries.items():
            if not self._is_ignored(name):
                self._note(name)
                self._fill(name, entry.cut(self._part(name)))
        if not checkpoint.is_current:
            raise ModelError(str(checkpoint.folder), "its files changed while they were read")
        self.end_update()
        self.adopt(checkpoint)

    def adopt(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._model, self._given, self._problem = checkpoint, str(checkpoint.folder), "", ""
        entries = checkpoint.entries
        self._placed = {name: (part, entries[name].cut(self._part(name))) for name, (part, _) in self._placed.items()}

    @torch.no_grad()
    def _derive(self) -> None:
        for tensor, compute in self._derived:
            tensor.copy_(compute())

    def _changed(self, what: str) -> ModelError:
        problem = f"the weights on disk are not those that were loaded: {what}. Put the loaded ones back"
        return ModelError(self._model, f"{problem}, or restart the worker to serve the new ones")

    def _pop(self, name: str, shape: tuple[int, ...]) -> Entry:
        entry = self._entries.pop(name, None)
        if entry is None:
            raise ModelError(self._model, f"tensor {name} is missing")
        _check_shape(self._model, name, entry.shape, self._whole(name, shape))
        return entry.cut(self._part(name))

    def _whole(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor whose part here has `shape`."""
        part = self._part(name)
        return shape if part is None else part.uncut(shape)

    def _part(self, name: str) -> Part | None:
        return None if self._shard is None else self._shard.part(name)

    def _num_bytes(self, name: str, entry: Entry) -> int:
        part, num_elements = self._part(name), math.prod(entry.shape)
        if part is not None:
            num_elements = num_elements // part.whole * len(part.held)
        group = self._groups.get(name, 0)
        if not group or not self._keeps_fp8:
            return padded_bytes(num_elements * self.dtype.itemsize)
        return padded_bytes(num_elements) + padded_bytes(num_elements // group * torch.float32.itemsize)

    def _group(self, name: str, entry: Entry) -> int:
        return fp8_entry.group_of(name, entry.cut(self._part(name)))

    def _tell(self, nbytes: int, total: int) -> None:
        """Logs progress every few seconds, because many GB take a while on their way to a GPU."""
        self._loaded_bytes += nbytes
        if time.monotonic() - self._told_s >= _PROGRESS_INTERVAL_S:
            self._told_s = time.monotonic()
            log.info("loading weights", model=self._model, mib=self._loaded_bytes >> 20, of_mib=total >> 20)


def _leaves(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of fields, under names with a dot."""
    leaves: dict[str, Any] = {}
    for name, field in value.items():
        leaves |= _leaves(field, f"{prefix}{name}.") if isinstance(field, dict) else {prefix + name: field}
    return leaves


def _check_shape(model: str, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ModelError(model, f"tensor {name} has shape {list(shape)}, expected {list(expected)}")


def _check_complete(model: str, missing: Collection[str]) -> None:
    if missing:
        raise ModelError(model, f"{len(missing)} tensors are missing: {_listed(sorted(missing))}")


def _change(old: MappedFile, new: MappedFile) -> str:
    shapes, others = ({name: (one.dtype, one.shape) for name, one in file.entries.items()} for file in (old, new))
    if names := sorted(name for name in shapes.keys() | others.keys() if shapes.get(name) != others.get(name)):
        return f"{len(names)} tensors are new, missing, or of another shape or dtype: {_listed(names)}"
    return "its tensors have other values"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
