"""The command line `baton`."""

import os

from baton.shadowing import guard_imports

os.environ.setdefault(
    "GRPC_VERBOSITY", "ERROR"
)  # set before grpc is loaded: its notes on closed connections say nothing


def main() -> None:
    guard_imports()
    from baton.cli.app import app

    app()
