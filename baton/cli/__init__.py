"""The command line `baton`."""

from baton.cli.app import main

__all__ = ["main"]
