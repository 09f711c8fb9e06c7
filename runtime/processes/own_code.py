"""The installation of Baton that this process runs from."""

import functools
import hashlib
import os
import stat
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from baton_proto.rollout import Code
from runtime.code_version import code_version
from runtime.errors import ConfigError
from runtime.own_files import ROOT

PACKAGES: Final = (
    "baton",
    "baton_proto",
    "decode_worker",
    "engine",
    "kvtransfer",
    "planner",
    "prefill_worker",
    "router",
    "runtime",
    "worker",
)  # that processes of a service import
SHOWN: Final = 8  # digits of the sources' hash


@functools.cache
def own_code() -> Code:
    """Its version has a hash of the sources, because a copy that somebody has changed keeps its number. To be called
    at the start, before the files may change."""
    digest, folders = hashlib.blake2b(digest_size=SHOWN // 2), dict[str, None]()
    for name in PACKAGES:
        spec = find_spec(name)
        assert spec is not None, f"{name} is ours"
        assert spec.submodule_search_locations, f"{name} is a package"
        folder = Path(spec.submodule_search_locations[0]).absolute()
        folders[str(folder.parent)] = None
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{name}/{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    return Code(f"{code_version()}-{digest.hexdigest()}", sys.executable, tuple(folders))


def check_code(code: Code) -> None:
    """Raises ConfigError for an installation that is not here, or that another user may have written: its processes
    have our keys."""
    for path in map(Path, (code.python, *code.paths)):
        try:
            about = path.stat()
        except OSError as error:
            raise ConfigError("code", f"{path}: {error.strerror or error}: install it here at the same path") from error
        if about.st_uid not in (ROOT, os.geteuid()) or about.st_mode & stat.S_IWOTH:
            raise ConfigError("code", f"{path}: others may have written it: chmod o-w, or install it as this user")
