"""Exit codes of `baton`, and how errors become one of them and a sentence on stderr."""

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import grpc
import typer

from runtime.errors import (
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    ModelError,
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

_BY_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: ExitCode.USAGE,
    grpc.StatusCode.NOT_FOUND: ExitCode.USAGE,
    grpc.StatusCode.OUT_OF_RANGE: ExitCode.USAGE,
    grpc.StatusCode.UNAVAILABLE: ExitCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ExitCode.DEADLINE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ExitCode.OVERLOADED,
}


@contextmanager
def errors_reported() -> Iterator[None]:
    """A context for the body of a command: an expected error ends the command with its sentence and its exit code."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            api = "API key" in (error.details() or "")  # of other keys the service says where they are
            fail(ExitCode.USAGE, f"{error.details()}" + api * "; give it with --api-key-file or BATON_API_KEY")
        fail(_BY_STATUS.get(error.code(), ExitCode.FAILED), error.details() or error.code().name)
    except (ConfigError, ModelError, InvalidRequestError, UnauthorizedError) as error:
        fail(ExitCode.USAGE, str(error))
    except UnavailableError as error:
        fail(ExitCode.UNAVAILABLE, str(error))
    except DeadlineError as error:
        fail(ExitCode.DEADLINE, str(error))
    except BatonError as error:
        fail(ExitCode.FAILED, str(error))
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def fail(code: ExitCode, message: str) -> NoReturn:
    """Ends the command."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
