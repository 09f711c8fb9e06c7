"""Which version of Baton this process runs."""

import functools
import importlib.metadata


@functools.cache
def code_version() -> str:
    """The version of the installed distribution."""
    try:
        return importlib.metadata.version("baton-serve")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
