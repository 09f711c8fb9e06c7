"""Converted models in the user's cache folder: each is made once, and visible only when it is complete.

Weights that others could have put there would give their answers, so a cache that others may write is refused.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.checkpoint.fingerprint import fingerprint
from runtime.errors import ModelError
from runtime.own_files import check_holds_own, open_file, opened_folder

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
    cache = cache_folder()
    folder = cache / "models" / name
    try:
        with opened_folder(cache) as top, opened_folder("models", within=top) as models:
            if not _is_there(name, models):
                with _locked(f"{name}.lock", models):
                    if not _is_there(name, models):
                        _fill(folder, make)
    except OSError as error:
        problem = f"cannot be converted into the cache {cache}: {error.strerror or error}"
        raise ModelError(model or name, f"{problem}; BATON_CACHE may name another folder") from error
    return folder


def _is_there(name: str, models: int) -> bool:
    """Raises OSError about what somebody else has made."""
    try:
        with opened_folder(name, within=models, make=False) as folder:
            check_holds_own(folder)
    except FileNotFoundError:
        return False
    return True


def _fill(folder: Path, make: Callable[[Path], None]) -> None:
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # a killed conversion leaves one
    unfinished.mkdir(mode=0o755)  # whatever the umask
    try:
        make(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(name: str, models: int) -> Iterator[None]:
    """Excludes other processes while the block runs; a killed process releases the lock."""
    with os.fdopen(open_file(name, os.O_WRONLY | os.O_CREAT, taboo=0, within=models), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
