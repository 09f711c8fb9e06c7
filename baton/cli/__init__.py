"""The command line `baton`."""

import os

from baton.shadowing import guard_imports

# Set before grpc is loaded, for us and for what we start. Its notes on closed connections say nothing, and servers
# write a line for each malformed header that a stranger sends.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def main() -> None:
    guard_imports()
    if os.getpid() == 1:
        from runtime.processes.first_process import run_in_child

        raise SystemExit(run_in_child())
    from baton.cli.app import app

    app()
