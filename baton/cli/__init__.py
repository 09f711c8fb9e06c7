"""The command line `baton`."""

import os

os.environ.setdefault(
    "GRPC_VERBOSITY", "ERROR"
)  # before grpc is loaded: its notes on closed connections say nothing here

from baton.cli.app import main

__all__ = ["main"]
