"""Which service a command means: the one that it was told, or the one that this user runs from this machine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from baton.runs.run_file import Run, choose_run
from runtime.errors import BatonError, UnavailableError

ANY_RAY = "auto"


def meant_run(service: str | None, ray_address: str, namespace: str) -> tuple[Run | None, str]:
    """The run on this machine that is meant, and None where it is on a Ray cluster; and its namespace there. Raises
    ConfigError."""
    run = choose_run(service) if service is not None or ray_address == ANY_RAY else None
    if run is None or not run.file.on_ray:
        return run, namespace
    return None, run.file.namespace if service is not None or namespace == "default" else namespace


@contextmanager
def ray_cluster(address: str, namespace: str) -> Iterator[None]:
    """Where nothing runs on this machine. Raises ConfigError, UnavailableError."""
    from baton.service.on_ray.cluster import connected

    with ExitStack() as closing:
        try:
            closing.enter_context(connected(address, namespace))
        except BatonError as error:
            if address != ANY_RAY:
                raise
            raise UnavailableError(f"no service of yours runs on this machine, nor on Ray: {error}") from error
        yield
