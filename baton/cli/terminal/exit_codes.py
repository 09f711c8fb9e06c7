"""Exit codes of `baton`, and how errors become one of them and a sentence on stderr."""

import enum
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from runtime.errors import (
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    ModelError,
    OverloadedError,
    UnauthorizedError,
    UnavailableError,
)


class ExitCode(enum.IntEnum):
    OK = 0
    FAILED = 1  # a process died or could not start, the service reported its own fault, or a difference was found
    USAGE = 2  # a flag, a key, the configuration, the model or the request is wrong
    UNAVAILABLE = 3  # nothing listens at the address, or no worker can serve
    DEADLINE = 4  # the answer was not complete in time
    OVERLOADED = 5  # the service's queue is full; try again
    INTERRUPTED = 130  # Ctrl-C, as shells count it


EXIT_CODES_HELP = (
    "Exit codes: 0 done; 1 failed; 2 wrong flag, key, configuration, model or request; 3 no service or no worker "
    "there; 4 deadline passed; 5 overloaded, try again; 130 interrupted."
)

HERE = "this machine"
NO_THREADS = f"{HERE}: no more threads or processes may be started (ulimit -u, or the pids limit of the container)"
THREAD_REFUSED = "can't start new thread"  # Python's words

_CODES = {
    ConfigError: ExitCode.USAGE,
    ModelError: ExitCode.USAGE,
    InvalidRequestError: ExitCode.USAGE,
    UnauthorizedError: ExitCode.USAGE,
    UnavailableError: ExitCode.UNAVAILABLE,
    DeadlineError: ExitCode.DEADLINE,
    OverloadedError: ExitCode.OVERLOADED,
}


@contextmanager
def errors_reported() -> Iterator[None]:
    """A context for the body of a command: an expected error ends the command with its sentence and its exit code."""
    try:
        yield
    except BatonError as error:
        fail(next((code for kind, code in _CODES.items() if isinstance(error, kind)), ExitCode.FAILED), str(error))
    except OSError as error:  # a full disk, a folder that nobody may write
        if error.strerror is None or error.errno == errno.EPIPE:  # who reads our output has gone
            raise
        fail(
            ExitCode.FAILED,
            NO_THREADS if error.errno == errno.EAGAIN else f"{error.filename or HERE}: {error.strerror}",
        )
    except RuntimeError as error:
        if str(error) != THREAD_REFUSED:
            raise
        fail(ExitCode.FAILED, NO_THREADS)
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def fail(code: ExitCode, message: str) -> NoReturn:
    """Ends the command."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
