"""What an observation says of one role: who serves, who is coming, who leaves. Pure views that policies and guards
share."""

from collections.abc import Iterable

from msgspec import Struct

from baton_proto.planner import ROLES, SOURCES, Observation, Role, Verb, WorkerView

LEAVING: tuple[Verb, ...] = ("remove", "drain", "sleep", "flip")
COMING: tuple[Verb, ...] = ("add", "wake")


class Counts(Struct, frozen=True):
    """Of one role. What is wanted is compared with `have`."""

    serving: int = 0  # ready, and to stay
    coming: int = 0  # starting, waking or turning into this role
    asleep: int = 0  # and to stay asleep

    @property
    def have(self) -> int:
        return self.serving + self.coming


def counts(observation: Observation, role: Role, failed: Iterable[str] = ()) -> Counts:
    """`failed`: workers that start and are not believed to become ready."""
    serving = coming = asleep = 0
    for worker in observation.workers:
        if worker.effect == "flip":
            coming += worker.role != role
        elif worker.role != role or worker.effect in LEAVING or worker.state == "draining":
            continue
        elif worker.state == "ready":
            serving += 1
        elif worker.state == "starting" or worker.effect in COMING:
            coming += worker.worker_id not in failed
        else:
            asleep += 1
    return Counts(serving, coming, asleep)


def of_role(observation: Observation, role: Role) -> list[WorkerView]:
    """The workers that serve now, those that are about to leave not among them."""
    return [
        worker
        for worker in observation.workers
        if worker.role == role and worker.state == "ready" and worker.effect not in LEAVING
    ]


def free_to_change(worker: WorkerView) -> bool:
    """No effect in flight, none that someone else has begun, and no operator's hand on it."""
    return worker.effect is None and worker.state != "draining" and not worker.held


def gpus_held(observation: Observation) -> int:
    return sum(worker.gpus for worker in observation.workers)


def free_gpus(observation: Observation) -> int:
    """Of the budget; what drains, starts or sleeps holds its GPUs."""
    return observation.gpu_budget - gpus_held(observation)


def gpus_of_role(observation: Observation, role: Role) -> int:
    """That a new worker of it takes; where nobody said so, the most that one of them has."""
    there = (worker.gpus for worker in observation.workers if worker.role == role)
    return observation.gpus_per_worker.get(role) or max(there, default=1)


def stale_sources(observation: Observation, stale_s: float) -> list[str]:
    """What was never heard is stale. Without a worker that serves, nothing is to be heard from workers."""
    serving = any(of_role(observation, role) for role in ROLES)
    wanted = SOURCES if serving else [source for source in SOURCES if source != "workers"]
    return [source for source in wanted if observation.ages_s.get(source, float("inf")) > stale_s]
