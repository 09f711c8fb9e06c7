"""Where Triton keeps the kernels that it has compiled, so that only the first start on a machine compiles them."""

import os
from typing import Final

from runtime.checkpoint.model_cache import cache_folder

VARIABLE: Final = "TRITON_CACHE_DIR"


def keep_kernels() -> None:
    """Makes the folder `kernels` of our cache Triton's, for this process and those that it starts, unless the variable
    names another one. Where it cannot be written, Triton keeps its own. To be called before Triton is imported."""
    if os.environ.get(VARIABLE):
        return
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return
    if os.access(folder, os.W_OK):
        os.environ[VARIABLE] = str(folder)
