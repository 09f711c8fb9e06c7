"""Where Prometheus finds the metrics of every process: the answer to its HTTP discovery (`GET /metrics/targets`).

Workers come from the directory. Every router, this one included, reports its address once a second; a router that went
silent without leaving stays listed for SILENT_ROUTER_S, so that Prometheus sees it down. The planner is asked.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import groupby

from msgspec import Struct

from baton_proto.discovery import WorkerRecord
from baton_proto.routers.router_report import RouterReport, decode_router_report
from runtime.calls.planner import ask_plan
from runtime.discovery.directory import Directory
from runtime.errors import BatonError, UnavailableError
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.subjects import router_subject

PLANNER_TIMEOUT_S = 1.0
SILENT_ROUTER_S = 900.0
SCHEME_LABEL = "__scheme__"  # Prometheus takes it from here


class Target(Struct, frozen=True):
    """One process, in the format of Prometheus. The metrics themselves carry further labels: role and worker."""

    targets: list[str]  # HOST:PORT
    labels: dict[str, str]


class ScrapeTargets:
    """Event loop only."""

    def __init__(
        self, nats: NatsClient, directory: Directory, service: str, tls: Collection[str] = (), model: str = ""
    ) -> None:
        """`service`: its namespace. `tls`: the components whose metrics are read by https. `model`: whose workers and
        planner these are, where several are served."""
        self._service = service
        self._tls = tls
        self._model = {"model": model} if model else {}
        self._nats = nats
        self._directory = directory
        self._routers: dict[str, tuple[str, float]] = {}  # id -> address, time of its last report (monotonic)
        self._planner = ""  # its address; empty: no planner runs

    async def start(self) -> None:
        await self._nats.hear(
            router_subject(self._nats.namespace), "router report", decode_router_report, self._receive
        )

    async def targets(self) -> list[Target]:
        self._planner = await self._ask_planner()
        self._forget_silent_routers()
        routers = defaultdict[str, list[str]](list)  # by address: one that is asked tells of all that share it
        for name, (address, _) in sorted(self._routers.items()):
            routers[address].append(name)
        found = [self._target(address, "router", _name(names)) for address, names in routers.items()]
        found += [
            self._target(address, "worker", _name([record.worker_id for record in workers]))
            for address, workers in groupby(self._workers(), lambda record: record.metrics_address)
        ]
        return found + ([self._target(self._planner, "planner", "planner")] if self._planner else [])

    def _target(self, address: str, component: str, process: str) -> Target:
        labels = {"namespace": self._service, "component": component, "process": process}
        if component != "router":
            labels |= self._model
        if component in self._tls:
            labels[SCHEME_LABEL] = "https"
        return Target([address], labels)

    def _workers(self) -> Iterable[WorkerRecord]:
        """The workers that can be scraped, ordered by address: workers of one process share its address."""
        able = [record for record in self._directory.workers.values() if record.metrics_address]
        return sorted(able, key=lambda record: (record.metrics_address, record.worker_id))

    async def _ask_planner(self) -> str:
        """The planner's address: the last known one when the planner cannot be asked, empty when no planner runs."""
        try:
            return (await ask_plan(self._nats, PLANNER_TIMEOUT_S)).metrics_address
        except UnavailableError:
            return ""
        except (BatonError, *NATS_ERRORS):
            return self._planner

    def _forget_silent_routers(self) -> None:
        if self._nats.connected:
            since_s = time.monotonic() - SILENT_ROUTER_S
            self._routers = {name: heard for name, heard in self._routers.items() if heard[1] >= since_s}

    def _receive(self, report: RouterReport) -> None:
        if report.leaving:
            self._routers.pop(report.router_id, None)
        elif report.metrics_address:
            self._routers[report.router_id] = (report.metrics_address, time.monotonic())


def _name(names: list[str]) -> str:
    """The name of what shares an address: workers of a process, or routers."""
    first, others = names[0], len(names) - 1
    return f"{first} and {others} more" if others else first
