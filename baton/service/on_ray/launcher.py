"""Starts the processes of a service on a Ray cluster, each in an actor of its own."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from typing import Any, Final

import ray
import structlog
from msgspec import Struct
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from baton.service.launcher import Launch, Machines, uses_gpus
from baton.service.on_ray.cluster import answer, find_actor, find_group, on_head
from baton.service.on_ray.process import RayProcess
from baton.service.on_ray.process_host import Hosted, ProcessHost, on_node, threads_of
from baton.service.on_ray.room import PLACED_S, Bundle, Room, has_room
from runtime.address import format_address, parse_address
from runtime.config.serving import ServingConfig
from runtime.processes.ports import free_port
from runtime.processes.process import Process, ProcessFailedError

CONTROL: Final = "baton-control"  # the one actor that is no host
NAME_FREE_S: Final = 10.0  # within which the name of a killed actor is free again
ANSWER_S: Final = 10.0  # within which an actor that lives answers
AGAIN_S: Final = 0.1

log = structlog.get_logger()


class Seat(Struct, frozen=True):
    host: Any  # a ProcessHost
    group: PlacementGroup | None


class RayLauncher:
    """Actors get their names in the namespace of the driver or actor that calls. They are detached: they end when they
    are told to, not with their starter."""

    on_ray = True
    log_dir = None

    def __init__(self, config: ServingConfig) -> None:
        resources = ray.cluster_resources()
        self.machines = Machines(int(resources.get("GPU", 0)), int(resources.get("CPU", 0)))
        self._room = Room(2 * config.planner.start_s)
        self._seats: dict[Process, Seat] = {}

    def here(self, config: ServingConfig) -> ServingConfig:
        return on_node(config, ray.util.get_node_ip_address())

    async def route(self, others: Collection[str], before: str = "") -> str:
        taken = Counter(parse_address(route)[0] for route in others)
        nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if before and parse_address(before)[0] in nodes:
            return before
        head = ray.util.get_node_ip_address()
        host = min(nodes, key=lambda node: (taken[node], node != head))
        port = ray.remote(free_port).options(num_cpus=0, scheduling_strategy=_on_node(nodes[host])).remote(host)
        return format_address(host, await answer(port))

    def process(self, launch: Launch) -> Process:
        process: RayProcess = RayProcess(launch.name, lambda: self._place(launch, process))
        return process

    def place(self, process: Process) -> Collection[str]:
        """Always empty: Ray gives each process GPUs of its own."""
        return ()

    async def has_room(self, launch: Launch) -> bool:
        """Asks for the place, and gives it back. Nodes that the cluster could start do not count."""
        bundle = self._bundle(launch)
        if not bundle:
            return True
        group = placement_group([dict(bundle)], "STRICT_PACK")
        try:
            return await has_room(group, PLACED_S)
        finally:
            remove_placement_group(group)

    def renew(self, config: ServingConfig) -> None:
        for seat in self._seats.values():
            seat.host.renew.remote(config)

    def release(self, process: Process) -> None:
        self._room.release(process)
        seat = self._seats.pop(process, None)
        if seat is not None:
            _end(seat)

    async def living(self) -> list[tuple[Launch, Process]]:
        """Clears away actors whose process has ended, or was never started, and places that no actor has."""
        for about in placement_group_table().values():
            if about["name"] and find_actor(about["name"]) is None:
                _give_back(find_group(about["name"]))
        found = await asyncio.gather(*(self._taken_over(name) for name in ray.util.list_named_actors()))
        return [one for one in found if one is not None]

    def close(self) -> None:
        """Does nothing: `release` has ended each actor."""

    async def _place(self, launch: Launch, process: Process) -> tuple[Any, int]:
        bundle = self._bundle(launch)
        seat = self._seats[process] = await self._new_seat(launch, bundle)
        return seat.host, await self._room.placed(process, bundle, seat.group, answer(seat.host.start.remote()))

    async def _new_seat(self, launch: Launch, bundle: Bundle) -> Seat:
        """Waits until the name is free: a worker that flips keeps its name."""
        deadline_s = time.monotonic() + NAME_FREE_S
        while find_actor(launch.name) is not None:
            if time.monotonic() > deadline_s:
                raise ProcessFailedError(launch.name, "cannot start: an actor of that name lives")
            await asyncio.sleep(AGAIN_S)
        group = None
        if bundle:
            _give_back(find_group(launch.name))
            group = placement_group([dict(bundle)], "STRICT_PACK", name=launch.name, lifetime="detached")
        options = on_head() if group is None else _options(bundle, group)
        if route := launch.routes.get(launch.name):
            nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
            options = {"num_cpus": 0, "scheduling_strategy": _on_node(nodes[parse_address(route)[0]])}
        actor = ray.remote(ProcessHost).options(name=launch.name, lifetime="detached", max_restarts=0, **options)
        return Seat(actor.remote(launch), group)

    def _bundle(self, launch: Launch) -> Bundle:
        if not launch.workers:
            return {}
        cpus = {"CPU": float(threads_of(launch.config) * launch.ranks)}
        return cpus | {"GPU": float(launch.ranks)} if uses_gpus(launch.config, self.machines) else cpus

    async def _taken_over(self, name: str) -> tuple[Launch, Process] | None:
        host = find_actor(name) if name != CONTROL else None
        if host is None:
            return None
        seat = Seat(host, find_group(name))
        try:
            about: Hosted = await asyncio.wait_for(answer(host.about.remote()), ANSWER_S)
        except (RayActorError, TimeoutError) as error:
            log.warning("an actor does not answer and is ended", actor=name, error=repr(error))
            _end(seat)
            return None
        if not about.pid:
            _end(seat)
            return None

        async def there() -> tuple[Any, int]:
            return host, about.pid

        process = RayProcess(name, there)
        await process.start()
        self._seats[process] = seat
        self._room.hold(process, self._bundle(about.launch))
        return about.launch, process


def _options(bundle: Bundle, group: PlacementGroup) -> dict[str, Any]:
    return {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
    }


def _on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def _end(seat: Seat) -> None:
    ray.kill(seat.host)
    _give_back(seat.group)


def _give_back(group: PlacementGroup | None) -> None:
    if group is not None:
        remove_placement_group(group)
