"""Converted models in the user's cache folder: each is made once, and visible only when it is complete."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.checkpoint.fingerprint import fingerprint
from runtime.errors import ModelError

VERSION = 2  # of the conversion's output; a new version converts again


def cache_folder() -> Path:
    """BATON_CACHE, else XDG_CACHE_HOME/baton, else ~/.cache/baton."""
    if own := os.environ.get("BATON_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def converted_folder(source: Path, convert: Callable[[Path, Path], None]) -> Path:
    """The folder that `convert(source, folder)` fills on the first call for this content of `source`. Raises
    ModelError, and what `convert` raises."""
    try:
        name = f"{source.stem}-{fingerprint(source)}-v{VERSION}"
    except OSError as error:
        raise ModelError(str(source), f"cannot be read: {error}") from error
    return made_folder(name, lambda folder: convert(source, folder), str(source))


def made_folder(name: str, make: Callable[[Path], None], model: str | None = None) -> Path:
    """The folder that `make(folder)` fills on the first call. Among processes that ask at the same time, one makes it
    and the others wait. Raises ModelError about `model`, and what `make` raises."""
    folder = cache_folder() / "models" / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                _fill(folder, make)
    except OSError as error:
        raise ModelError(model or name, f"cannot be converted into the cache: {error}") from error
    return folder


def _fill(folder: Path, make: Callable[[Path], None]) -> None:
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # a killed conversion leaves one
    unfinished.mkdir()
    try:
        make(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Excludes other processes while the block runs; a killed process releases the lock."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
