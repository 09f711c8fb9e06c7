"""Where Triton keeps the kernels that it has compiled, so that only the first start on a machine compiles them."""

import os
from pathlib import Path
from typing import Final

import structlog

from runtime.checkpoint.model_cache import cache_folder
from runtime.own_files import is_own, open_folder, opened_folder

VARIABLE: Final = "TRITON_CACHE_DIR"

log = structlog.get_logger()


def keep_kernels() -> None:
    """Makes the folder `kernels` of our cache Triton's, for this process and those that it starts, unless the variable
    names another one that is new or ours: Triton runs what it finds. Where ours cannot be used, Triton keeps its own.
    To be called before Triton is imported."""
    if named := os.environ.get(VARIABLE):
        if is_own(Path(named)) or not os.path.lexists(named):
            return
        log.warning("compiled kernels are not taken from a folder that others may write", folder=named)
        del os.environ[VARIABLE]
    try:
        cache = cache_folder()
        with opened_folder(cache) as top:
            os.close(open_folder("kernels", within=top))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        log.info("compiled kernels are not kept in our cache", why=str(error))
        return
    if os.access(cache / "kernels", os.W_OK):
        os.environ[VARIABLE] = str(cache / "kernels")
