"""Which service a command means: the one that it was told, or the one that this user runs on this machine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from baton.runs.run_file import Run, choose_run
from runtime.errors import BatonError, UnavailableError

ANY_RAY = "auto"


def local_run(service: str | None, ray_address: str) -> Run | None:
    """The run on this machine that is meant; None: one on a Ray cluster. Raises ConfigError."""
    if service is None and ray_address != ANY_RAY:
        return None
    run = choose_run(service)
    return None if run is None or run.file.on_ray else run


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
