"""A checkpoint on disk: the .safetensors files of a folder, mapped, and the hashes of their content."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

from engine.model.mapped_file import Entry, map_file
from runtime.checkpoint.model_files import weight_files

HASHING_THREADS = 4  # of one worker; a thread hashes 10 GB/s


class Checkpoint:
    def __init__(self, folder: Path) -> None:
        """Raises ModelError when a file is missing or malformed."""
        self.folder = folder
        self.files = [map_file(path) for path in weight_files(folder)]
        self.hashes: list[Future[str]] = []  # of the files; none: not asked for

    @property
    def entries(self) -> dict[str, Entry]:
        """Where each tensor lies."""
        return {name: entry for file in self.files for name, entry in file.entries.items()}

    @property
    def is_current(self) -> bool:
        """Whether the folder still has the files that are mapped, with no write to them since. Raises ModelError."""
        return weight_files(self.folder) == [file.path for file in self.files] and all(
            file.is_current for file in self.files
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
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


def loaded(entry: Entry) -> torch.Tensor:
    data = entry.data[entry.start : entry.end]
    if data.storage_offset() % entry.dtype.itemsize:  # early writers did not align tensors
        data = data.clone()
    tensor = data.view(entry.dtype)
    if entry.columns is None:
        return tensor.view(entry.shape)
    return tensor.view(entry.shape[0], -1)[:, entry.columns.start : entry.columns.stop]
