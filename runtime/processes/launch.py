"""`python -m runtime.processes.launch PARENT_PID PROGRAM [ARGUMENT...]`: runs a program that dies with its parent.

PROGRAM is a Python module, run as `python -m` does, or the path of a binary. The new process ties itself to its parent
before it imports anything else. A `preexec_fn` in the parent could not do this, because it forks, and gRPC's threads do
not survive a fork.
"""

import os
import runpy
import sys
from pathlib import Path

from runtime.processes.die_with_parent import die_with_parent


def main() -> None:
    _, parent_pid, program, *arguments = sys.argv
    die_with_parent(int(parent_pid))
    if os.path.isabs(program):
        os.execv(program, [program, *arguments])
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def launch_command(program: str, python: Path | None = None) -> list[str]:
    """The command line that starts PROGRAM tied to this process; PROGRAM's arguments follow. `-P` keeps packages of the
    current folder from hiding ours. python: another interpreter than this one's."""
    return [str(python or sys.executable), "-P", "-m", "runtime.processes.launch", str(os.getpid()), program]


if __name__ == "__main__":
    main()
