"""A small disk of the service's own, which can be full."""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

SIZE_MIB = 1024  # JetStream takes three quarters of it, and reserves 256 MiB for each attempt to add a stream
CHUNK_BYTES = 1 << 20


@functools.cache
def why_no_small_disk() -> str:
    if os.geteuid() != 0:
        return "a small disk (tmpfs) needs root"
    with tempfile.TemporaryDirectory(prefix="baton-chaos-") as folder, Disk(Path(folder) / "disk") as disk:
        return "" if disk.mounted else "this root may not mount a small disk (tmpfs)"


@dataclass
class Disk:
    """A tmpfs at `folder` where we may mount, else just the folder."""

    folder: Path
    mounted: bool = False

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=0700", "tmpfs", str(self.folder)]
        self.mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The logs are kept."""
        self.empty()
        if self.mounted:
            for log in self.folder.glob("*.log"):
                shutil.copy(log, self.folder.parent)
            subprocess.run(["umount", "-l", str(self.folder)], check=False)

    def fill(self) -> None:
        assert self.mounted, "only a disk of our own may be filled"
        with open(self._filler, "ab", buffering=0) as filler:
            for size in (CHUNK_BYTES, 4096, 1):
                with contextlib.suppress(OSError):
                    while filler.write(bytes(size)) == size:
                        pass

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.folder / "filler"
