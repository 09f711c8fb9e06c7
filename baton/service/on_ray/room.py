"""Room on the cluster for one more process: asked for when no node has room, given up after a time with the reason."""

import asyncio
import time
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeVar

import ray
import structlog
from ray.autoscaler.sdk import request_resources
from ray.util.placement_group import PlacementGroup

from runtime.processes.process import Process, ProcessFailedError

PLACED_S: Final = 5.0  # within which a cluster that has room gives it, most of the time
ACTOR_S: Final = 120.0  # for an actor that has room: on a busy machine Ray takes a while to start its process
AGAIN_S: Final = 0.25  # a wait for room is in a thread, which a cancelled start leaves after that time

T = TypeVar("T")
Bundle = Mapping[str, float]  # amounts by resource, all on one node

log = structlog.get_logger()


class Room:
    """What our processes hold on the cluster, and what they wait for. Because a request to Ray's autoscaler names what
    the whole cluster should hold at least, each request includes what our processes hold already. The last request
    counts: two services on one cluster replace each other's."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[Process, Bundle] = {}
        self._waiting: set[Process] = set()

    async def placed(self, process: Process, bundle: Bundle, group: PlacementGroup | None, started: Awaitable[T]) -> T:
        """The result of `started`, once the process has its place: the bundle of its group. One without a group needs
        none. Raises ProcessFailedError naming what is missing when the time is up."""
        self.hold(process, bundle)
        task = asyncio.ensure_future(started)
        try:
            if group is not None and not await has_room(group, min(PLACED_S, self._timeout_s)):
                with self._asked_for(process):
                    if not await has_room(group, self._timeout_s - PLACED_S):
                        problem = f"found no room on the Ray cluster within {self._timeout_s:g} s: {missing(bundle)}"
                        raise ProcessFailedError(process.name, problem)
            done, _ = await asyncio.wait({task}, timeout=ACTOR_S)
            if not done:
                raise ProcessFailedError(process.name, f"has room on the Ray cluster, but no actor after {ACTOR_S:g} s")
            return task.result()
        finally:
            task.cancel()

    def hold(self, process: Process, bundle: Bundle) -> None:
        """Counts the bundle as held by the process."""
        self._held[process] = bundle

    def release(self, process: Process) -> None:
        self._held.pop(process, None)

    @contextmanager
    def _asked_for(self, process: Process) -> Iterator[None]:
        log.info("not placed yet; the cluster is asked for room", process=process.name, **self._held[process])
        self._waiting.add(process)
        try:
            self._request()
            yield
        finally:
            self._waiting.discard(process)
            self._request()

    def _request(self) -> None:
        request_resources(bundles=[dict(bundle) for bundle in self._held.values() if bundle] if self._waiting else [])


async def has_room(group: PlacementGroup, timeout_s: float) -> bool:
    """Whether the group gets its place within the time."""
    deadline_s = time.monotonic() + timeout_s
    while not await asyncio.to_thread(group.wait, AGAIN_S):
        if time.monotonic() > deadline_s:
            return False
    return True


def missing(bundle: Bundle) -> str:
    """Why no node has room for the bundle, as far as Ray tells: a clause."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    for resource, amount in bundle.items():
        most = max((node.get(resource, 0) for node in nodes), default=0)
        if most < amount:
            return f"it takes {amount:g} {resource}, and no node has more than {most:g}"
    short = [resource for resource, amount in bundle.items() if free.get(resource, 0) < amount]
    needs = " and ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
    left = ", ".join(f"{free.get(resource, 0):g} {resource}" for resource in short or bundle)
    return f"it takes {needs} on one node, and {left} are free on all {len(nodes)} nodes together"
