"""The Ray cluster that a service runs on. Because Ray is an optional dependency, only this folder imports Ray, and
other modules import this folder late."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

from baton.service.telling import Tell
from runtime.address import parse_address
from runtime.errors import BatonError, ConfigError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
CONNECT_TRIES = "3"  # for Ray, which would try 20 times with a wrong token
NODES_TIMEOUT_S = 1800.0  # a node of a cloud may have to boot, and to install torch for CUDA
AGAIN_S = 1.0
HEAD = "node:__internal_head__"  # a resource that Ray gives the head node
PINNED = 0.001  # share of HEAD that ties an actor to the head node

T = TypeVar("T")


@contextlib.contextmanager
def connected(address: str, namespace: str) -> Iterator[None]:
    """A context in which this process is a driver of the cluster. `address`: `auto` (the cluster that this machine
    belongs to) or HOST:PORT. Raises ConfigError when Ray is not installed, UnavailableError without a cluster."""
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", CONNECT_TRIES)
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise ConfigError("ray", "is not installed: pip install 'ray[default]'") from None

    try:
        _check(address)
        _leave_stdout_to_us()
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


def wait_for_nodes(wanted: int, tell: Tell, timeout_s: float = NODES_TIMEOUT_S) -> None:
    """Returns when `wanted` nodes live, the head included. Raises UnavailableError when the time is up."""
    import ray

    deadline_s = time.monotonic() + timeout_s
    told = wanted
    while (there := sum(node["Alive"] for node in ray.nodes())) < wanted:
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"{there} of {wanted} nodes have joined the cluster within {timeout_s:g} s")
        if there != told:
            tell(f"waiting for nodes: {there} of {wanted} are there", event="waiting", nodes=there, wanted=wanted)
            told = there
        time.sleep(AGAIN_S)


def ray_namespace(namespace: str) -> str:
    """Ray's namespace for the names of the service's actors."""
    return f"baton-{namespace}"


def find_actor(name: str) -> Any | None:
    """An actor of our namespace; None when there is none."""
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def find_group(name: str) -> Any | None:
    """A placement group of our namespace; None when there is none."""
    import ray

    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def on_head() -> dict[str, Any]:
    """Options of an actor that must be on the head node, because other nodes may go."""
    return {"num_cpus": 0, "resources": {HEAD: PINNED}}


async def answer(call: Awaitable[T]) -> T:
    """The answer of an actor. Raises RayActorError when the actor is gone, and an error of Baton as it is."""
    from ray.exceptions import RayTaskError

    try:
        return await call
    except RayTaskError as error:
        if isinstance(error.cause, BatonError):
            raise error.cause from None
        raise


def _leave_stdout_to_us() -> None:
    """Makes Ray tell of nodes that died and the like on stderr, because stdout carries results, also for programs."""
    from ray._private import worker

    tell = worker.print_to_stdstream

    def tell_on_stderr(data: dict[str, Any], ignore_prefix: bool) -> None:
        tell({**data, "is_err": True}, ignore_prefix)

    worker.print_to_stdstream = tell_on_stderr


def _check(address: str) -> None:
    """Connects once, because Ray would try for minutes. Raises OSError or ValueError."""
    from ray._private.services import canonicalize_bootstrap_address

    where = canonicalize_bootstrap_address(address)
    if where is None:
        raise ValueError("give `auto` or HOST:PORT")
    with socket.create_connection(parse_address(where), CONNECT_TIMEOUT_S):
        pass
