"""Converted models in the user's cache folder: made once, complete whenever visible, whoever asks at the same time."""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.checkpoint.fingerprint import fingerprint
from runtime.errors import ModelError

VERSION = 1  # of what the conversion writes; a new one converts again


def cache_folder() -> Path:
    """BATON_CACHE, else XDG_CACHE_HOME/baton, else ~/.cache/baton."""
    if own := os.environ.get("BATON_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def converted_folder(source: Path, convert: Callable[[Path, Path], None]) -> Path:
    """The folder that `convert(source, folder)` fills for this very content of `source`, on the first call.

    Of several processes that ask at once, one converts and the others wait. Raises ModelError, and whatever `convert`
    raises.
    """
    try:
        name = f"{source.stem}-{fingerprint(source)}-v{VERSION}"
        return _made(name, lambda folder: convert(source, folder))
    except OSError as error:
        raise ModelError(str(source), f"cannot be converted: {error}") from error


def made_folder(name: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make(folder)` fills on the first call. Raises ModelError."""
    try:
        return _made(name, make)
    except OSError as error:
        raise ModelError(name, f"cannot be written into the cache: {error}") from error


def _made(name: str, make: Callable[[Path], None]) -> Path:
    folder = cache_folder() / "models" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            _fill(folder, make)
    return folder


def _fill(folder: Path, make: Callable[[Path], None]) -> None:
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a conversion that was killed
    unfinished.mkdir()
    try:
        make(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Between processes, for as long as the block runs; a killed process releases it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
