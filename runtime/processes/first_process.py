"""What PID 1 of a container owes to the others: it passes signals on and collects the dead whose parents ended before
them. The command itself runs in a child, because it may wait for its own children alone."""

import contextlib
import os
import signal
import sys

PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
SI_KERNEL = 0x80  # a terminal has sent the signal, to all of its processes


def run_in_child() -> int:
    """Runs this program again, as a child. Returns its exit code, as shells count it, once it has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    command = [sys.executable, *sys.orig_argv[1:]]
    child = os.posix_spawn(sys.executable, command, os.environ, setsigmask=())
    while True:
        caught = signal.sigwaitinfo(PASSED_ON | {signal.SIGCHLD})
        if caught.si_signo != signal.SIGCHLD:
            if caught.si_code != SI_KERNEL:
                os.kill(child, caught.si_signo)
            continue
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
