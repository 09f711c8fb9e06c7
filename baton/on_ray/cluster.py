"""The Ray cluster that a service runs on. What imports Ray lies in this folder, and nothing else imports that at its
start: Ray is an extra."""

import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

from baton.errors import BatonError, ConfigError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
CONNECT_TRIES = "3"  # of Ray, once something listens: with a wrong token it would try 20 times
HEAD = "node:__internal_head__"  # a resource that Ray gives the head node
PINNED = 0.001  # of it

T = TypeVar("T")


@contextlib.contextmanager
def connected(address: str, namespace: str) -> Iterator[None]:
    """As a driver of the cluster: `auto` (the one that this machine belongs to) or HOST:PORT. What it makes outlives it
    when it is detached. Raises ConfigError when Ray is not installed, UnavailableError when no cluster is there."""
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", CONNECT_TRIES)
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise ConfigError("ray", "is not installed: pip install 'baton-serve[ray]'") from None

    try:
        _check(address)
        ray.init(
            address=address,
            namespace=ray_namespace(namespace),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise UnavailableError(f"no Ray cluster at {address!r}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def ray_namespace(namespace: str) -> str:
    """In which the actors of a service have their names."""
    return f"baton-{namespace}"


def find_actor(name: str) -> Any | None:
    """Of our namespace."""
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def on_head() -> dict[str, Any]:
    """Options of an actor that must not be on a node which may go."""
    return {"num_cpus": 0, "resources": {HEAD: PINNED}}


async def answer(call: Awaitable[T]) -> T:
    """Of an actor. Raises RayActorError when that is gone, and its own errors as it raised them."""
    from ray.exceptions import RayTaskError

    try:
        return await call
    except RayTaskError as error:
        if isinstance(error.cause, BatonError):
            raise error.cause from None
        raise


def _check(address: str) -> None:
    """Ray itself would try for minutes. Raises OSError or ValueError."""
    from ray._private.services import canonicalize_bootstrap_address

    where = canonicalize_bootstrap_address(address)
    if where is None:
        raise ValueError("give `auto` or HOST:PORT")
    host, _, port = where.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
        pass
