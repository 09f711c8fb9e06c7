"""Pure functions of an observation: which workers of a role serve, are coming or leave, and which GPUs are free."""

from collections.abc import Iterable

from msgspec import Struct

from baton_proto.planner import ROLES, SOURCES, Observation, Role, Verb, WorkerView
from planner.policy import pace

LEAVING: tuple[Verb, ...] = ("remove", "drain", "sleep", "flip")
COMING: tuple[Verb, ...] = ("add", "wake")


class Counts(Struct, frozen=True):
    """Workers of one role. `have` is compared with the wanted count."""

    serving: int = 0  # ready, and not leaving
    coming: int = 0  # starting, waking or turning into this role
    asleep: int = 0  # and not waking

    @property
    def have(self) -> int:
        return self.serving + self.coming


def counts(observation: Observation, role: Role, failed: Iterable[str] = ()) -> Counts:
    """`failed`: workers that start but are not expected to become ready; they are not counted."""
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
    """The workers of the role that serve now and are not about to leave."""
    return [
        worker
        for worker in observation.workers
        if worker.role == role and worker.state == "ready" and worker.effect not in LEAVING
    ]


def free_to_change(worker: WorkerView) -> bool:
    """Whether no effect is in flight, the worker is not draining, and no operator holds it."""
    return worker.effect is None and worker.state != "draining" and not worker.held


def gpus_held(observation: Observation) -> int:
    return sum(worker.gpus for worker in observation.workers)


def gpus_allowed(observation: Observation) -> int:
    """GPUs that the workers may hold, beside those of other models."""
    return observation.gpu_budget if observation.gpu_share is None else observation.gpu_share


def free_gpus(observation: Observation) -> int:
    """GPUs that may be held and that no worker holds; workers that drain, start or sleep hold theirs."""
    return gpus_allowed(observation) - gpus_held(observation)


def gpus_of_role(observation: Observation, role: Role) -> int:
    """GPUs that a new worker of the role takes. If the observation does not say, the most that one of them holds."""
    held = (worker.gpus for worker in observation.workers if worker.role == role)
    return observation.gpus_per_worker.get(role) or max(held, default=1)


def stale_sources(observation: Observation) -> list[str]:
    """Sources silent for more than pace.STALE_S, or never heard. Without a ready worker, `workers` is not stale."""
    serving = any(of_role(observation, role) for role in ROLES)
    wanted = SOURCES if serving else [source for source in SOURCES if source != "workers"]
    return [source for source in wanted if observation.ages_s.get(source, float("inf")) > pace.STALE_S]
