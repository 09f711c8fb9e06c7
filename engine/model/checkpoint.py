"""A checkpoint on disk: the .safetensors files of a folder, mapped, and the hashes of their content."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash
from torch import Tensor

from engine.model.fused_tensors import FUSED, parts_of
from engine.model.mapped_file import Entry, map_file
from engine.model.scaled_tensors import QUANTIZED, scaled, with_scales
from engine.model.shard import Part
from runtime.checkpoint.model_config import ModelConfig, load_model_config
from runtime.checkpoint.model_files import weight_files
from runtime.errors import ModelError

HASHING_THREADS = 4  # of one worker; a thread hashes 10 GB/s


class Checkpoint:
    def __init__(self, folder: Path) -> None:
        """Raises ModelError when a file is missing or malformed."""
        self.folder = folder
        self.files = [map_file(path) for path in weight_files(folder)]
        self.hashes: list[Future[str]] = []  # of the files; none: not asked for

    @property
    def entries(self) -> dict[str, Entry]:
        """Where each tensor lies. Raises ModelError when one that is several of ours has other rows than they, or one
        has no scale that fits it."""
        entries = {name: entry for file in self.files for name, entry in file.entries.items()}
        if any(entry.dtype in QUANTIZED for entry in entries.values()):
            entries = with_scales(entries, self.folder)
        if not any(name.removesuffix(".weight").endswith(FUSED) for name in entries):
            return entries
        config = load_model_config(self.folder)
        return {part: cut for name, entry in entries.items() for part, cut in self._parts(name, entry, config)}

    def _parts(self, name: str, entry: Entry, config: ModelConfig) -> Iterator[tuple[str, Entry]]:
        parts, start = parts_of(name, config), 0
        if not parts:
            yield name, entry
            return
        if len(entry.shape) != 2 or entry.shape[0] != sum(parts.values()):
            problem = f"tensor {name} has shape {list(entry.shape)}, expected {sum(parts.values())} rows"
            raise ModelError(str(self.folder), problem)
        for part, rows in parts.items():
            yield part, entry.cut(Part(0, entry.shape[0], range(start, start + rows)))
            start += rows

    @property
    def is_current(self) -> bool:
        """Whether the folder still has the files that are mapped, with no write to them since. Raises ModelError."""
        return weight_files(self.folder) == [file.path for file in self.files] and all(
            file.is_current for file in self.files
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor under its name: a view of its file, but for one that is not aligned there."""
        for name, entry in self.entries.items():
            yield name, loaded(entry)

    def start_hashing(self) -> None:
        """Hashes all files, beside what loads them."""
        threads = ThreadPoolExecutor(HASHING_THREADS, thread_name_prefix="hash-weights")
        self.hashes = [threads.submit(file.content_hash) for file in self.files]
        threads.shutdown(wait=False)

    def fingerprint(self) -> str:
        """Names the content of the files. Waits until they are hashed."""
        if not self.hashes:
            self.start_hashing()
        return xxhash.xxh3_128_hexdigest("".join(one.result() for one in self.hashes).encode())


def loaded(entry: Entry) -> Tensor:
    """Values of the entry's dtype, or products in float32."""
    data = entry.data[entry.start : entry.end]
    if data.storage_offset() % entry.dtype.itemsize:  # early writers did not align tensors
        data = data.clone()
    values = data.view(entry.dtype)
    tensor = values.view(entry.whole) if entry.scale is None else scaled(values, entry.whole, entry.scale)
    for part in entry.parts:
        tensor = cut(tensor, part)
    return tensor


def cut(tensor: Tensor, part: Part | None) -> Tensor:
    """The part of a tensor that a rank holds."""
    return tensor if part is None else tensor.narrow(part.dimension, part.held.start, len(part.held))
