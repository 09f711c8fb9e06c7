"""`python -m baton.launch PARENT_PID MODULE [ARGUMENT...]`: `python -m MODULE` in a process that dies with its parent.

ChildProcess starts every child through it. The tie is made in the new process, before anything else is imported, and
not by a `preexec_fn` in the old one: that forks, which gRPC's threads, if the old process has any, do not survive.
"""

import runpy
import sys

from baton.die_with_parent import die_with_parent


def main() -> None:
    _, parent_pid, module, *arguments = sys.argv
    die_with_parent(int(parent_pid))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
