"""The observer of a live service: it receives the reports of routers, workers and discovery over NATS.

The observer sends no requests to the sources. When a source falls silent, its age (`Observation.ages_s`) grows until
the planner changes nothing any more.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from baton_proto.planner import DECODE, MAJOR, PREFILL, Holds, Interval, LoadSample, Observation, Role
from planner.acting.connector import WorkerProcess
from planner.observing.router_board import RouterBoard
from planner.observing.worker_board import WorkerBoard
from planner.policy import pace
from runtime.config.serving import ServingConfig
from runtime.end_task import end_tasks
from runtime.errors import UnavailableError
from runtime.nats.client import NATS_ERRORS, NatsClient

SAMPLE_S: Final = 1.0
NEWS_S: Final = 1.5  # how long an observation waits for the next report of a router
SAMPLES_KEPT: Final = 600  # at most, between two observations
BLIND_INTERVAL_S: Final = 1.0  # length of an interval without a report of a router


class LiveObserver:
    """`processes` returns the supervisor's processes, `holds` the counts set by hand. `gpu_budget`: GPUs that the
    workers may hold together."""

    def __init__(
        self,
        nats: NatsClient,
        config: ServingConfig,
        processes: Callable[[], Iterable[WorkerProcess]],
        gpu_budget: int,
        gpus_per_worker: Mapping[Role, int],
        holds: Callable[[], Holds],
    ) -> None:
        self._nats = nats
        self._budget = gpu_budget
        self._gpus_per_worker = dict(gpus_per_worker)
        self._holds = holds
        self._routers = RouterBoard(nats)
        self._workers = WorkerBoard(nats, config, processes, gpus_per_worker)
        self._samples: list[LoadSample] = []
        self._discovery_s: float | None = None  # monotonic, of the last round trip
        self._sampler: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._routers.start()
        await self._workers.start()
        await self._routers.wait_for_news(NEWS_S)  # the first interval begins with the first report
        self._sampler = asyncio.create_task(self._sample())

    async def close(self) -> None:
        await end_tasks(self._sampler)
        await self._workers.close()

    async def __call__(self) -> Observation:
        """The next observation. Raises UnavailableError while no router has sent anything new and the last report is
        not yet stale."""
        await self._routers.wait_for_news(NEWS_S)
        ages_s = await self._ages_s()
        interval = self._routers.take_interval(self._samples)
        if interval is None and ages_s.get("routers", 0.0) <= pace.STALE_S:
            raise UnavailableError("no router has said anything since the last observation")
        self._samples = []
        return Observation(
            MAJOR,
            time.time(),
            self._budget,
            self._workers.views(),
            self._routers.queue(),
            interval or Interval(BLIND_INTERVAL_S, 0, 0, 0.0, 0, 0, 0),
            self._workers.take_steps(),
            self._holds(),
            gpus_per_worker=self._gpus_per_worker,
            ages_s=ages_s,
        )

    async def _ages_s(self) -> dict[str, float]:
        """Seconds since each source was last heard; sources never heard are left out. Because discovery is a watch on
        NATS, discovery counts as heard when NATS answers."""
        try:
            await self._nats.flush()
            self._discovery_s = time.monotonic()
        except NATS_ERRORS:
            pass
        discovery_s = None if self._discovery_s is None else time.monotonic() - self._discovery_s
        ages_s = {"routers": self._routers.age_s(), "workers": self._workers.age_s(), "discovery": discovery_s}
        return {source: age_s for source, age_s in ages_s.items() if age_s is not None}

    async def _sample(self) -> None:
        """Samples the load every SAMPLE_S. Requests in the queues of prefill workers count as those in the routers'."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            workers = self._workers
            queue = self._routers.waiting() + workers.waiting_for_prefill()
            sample = LoadSample(queue, workers.kv_load(), workers.serving(PREFILL), workers.serving(DECODE))
            self._samples = [*self._samples[-SAMPLES_KEPT:], sample]
