"""The logs of a service on a Ray cluster as one, whichever of its processes and nodes still live."""

from itertools import chain
from typing import Any, Final

import ray
import structlog
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.service.logs.merged_logs import Entry, in_order
from baton.service.on_ray.node_logs import NodeLogs

FIRST_S: Final = 20.0  # for the first answers: an actor has to start on each node
NEXT_S: Final = 1.0  # for further ones; a later answer is shown when it comes

log = structlog.get_logger()


class ClusterLogs:
    """A reader on each node, which ends with this driver. None of the service's own actors is asked, so a slow reader
    slows nobody down, and the logs of those that have died are shown. A node that has gone is left out."""

    there = True

    def __init__(self, process: str | None = None) -> None:
        self._process = process
        self._readers: dict[str, Any] = {}  # by id of the node; None: cannot be reached any more
        self._asked: dict[Any, str] = {}  # answers that have not come -> id of the node
        self._known: set[str] = set()

    def processes(self) -> list[str]:
        """The names of all processes that have a log on a node that has answered."""
        return list(self._known)

    def tail(self, lines: int) -> list[Entry]:
        """The last lines of all, in order, and perhaps some more before them."""
        found = self._answers("tail", FIRST_S, lines)
        for node in self._asked.values():
            log.warning("a node has not answered yet", node=node, waited_s=FIRST_S)
        return found[-lines:] if lines else []

    def news(self) -> list[Entry]:
        """What was written since, in order."""
        return self._answers("news", NEXT_S)

    def _answers(self, method: str, timeout_s: float, *arguments: Any) -> list[Entry]:
        self._meet_nodes()
        waiting = set(self._asked.values())
        for node, reader in self._readers.items():
            if reader is not None and node not in waiting:
                self._asked[getattr(reader, method).remote(*arguments)] = node
        if not self._asked:
            return []
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=timeout_s)
        return in_order(chain.from_iterable(map(self._answer, answered)))

    def _answer(self, call: Any) -> list[Entry]:
        node = self._asked.pop(call)
        try:
            entries, processes = ray.get(call)
        except RayError as error:
            log.warning("logs of a node cannot be read any more", node=node, error=str(error))
            self._readers[node] = None
            return []
        self._known.update(processes)
        return list(entries)

    def _meet_nodes(self) -> None:
        for node in (node["NodeID"] for node in ray.nodes() if node["Alive"]):
            if node not in self._readers:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                again = {"max_restarts": 1, "max_task_retries": 1}  # it is only read
                reader: Any = ray.remote(NodeLogs).options(num_cpus=0, scheduling_strategy=there, **again)
                self._readers[node] = reader.remote(self._process)
