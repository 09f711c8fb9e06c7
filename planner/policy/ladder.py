"""The ladder: from wanted counts to actions. A role gets workers by the fastest verb possible: wake a sleeper, flip a
worker that the other role can spare, add a new one. Verbs that the connector lacks are skipped. Invariant: a worker
with an effect in flight, or one that an operator holds, gets no action.
"""

from collections.abc import Mapping

from baton_proto.planner import OTHER_ROLE, ROLES, Action, Observation, Role, WorkerView
from planner.policy.history import Situation
from planner.policy.observation import COMING, free_gpus, free_to_change, gpus_allowed, gpus_held, gpus_of_role
from planner.policy.wanted import Wanted


def actions_for(wanted: Wanted, now: Situation, next_number: int, model: str = "") -> list[Action]:
    """`next_number`: the number in the id of the first worker added; later ones count on from it. `model`: as the ids
    have it, where several models are served."""
    observation, counts = now.observation, now.counts
    spare = {role: _leaving_order(now, role)[: max(0, counts[role].have - wanted.of(role))] for role in ROLES}
    lacking = {role: max(0, wanted.of(role) - counts[role].have) for role in ROLES}
    actions: list[Action] = []
    free = free_gpus(observation)
    for role in ROLES:
        other = OTHER_ROLE[role]
        sleepers = [w for w in observation.workers if w.role == role and w.state == "sleeping" and free_to_change(w)]
        while lacking[role] and sleepers and "wake" in observation.verbs:
            actions.append(
                Action("wake", sleepers.pop(0).worker_id, role, f"{role} needs more: a sleeper wakes fastest")
            )
            lacking[role] -= 1
        needed = gpus_of_role(observation, role)
        turning = [worker for worker in spare[other] if worker.state == "ready"]
        while lacking[role] and turning and turning[0].gpus + free >= needed and "flip" in observation.verbs:
            worker = turning.pop(0)
            spare[other].remove(worker)
            free -= max(0, needed - worker.gpus)
            actions.append(Action("flip", worker.worker_id, role, f"{other} can spare it and {role} needs one"))
            lacking[role] -= 1
    actions += _added(lacking, free, now, next_number, f"-{model}" if model else "")
    asleep = sum(counts[role].asleep for role in ROLES)
    keeps = now.config.keep_asleep if gpus_held(observation) <= gpus_allowed(observation) else 0
    for role in ROLES:
        for worker in spare[role]:
            sleeps = worker.state == "ready" and asleep < keeps and "sleep" in observation.verbs
            asleep += sleeps
            if action := _taken_away(worker, observation, sleeps):
                actions.append(action)
    return actions


def _added(lacking: Mapping[Role, int], free: int, now: Situation, next_number: int, of_model: str) -> list[Action]:
    """Adds workers while `free` GPUs are left, first of the role that lacks the larger part. A role whose last start
    failed gets none before its `retry_s`."""
    observation = now.observation
    actions: list[Action] = []
    waits = {role for role in ROLES if now.history[role].retry_s > observation.time_s}
    left = {role: 0 if role in waits else lacking[role] for role in ROLES}
    if "add" not in observation.verbs:
        return actions
    while any(left.values()):
        role = max(ROLES, key=lambda role: left[role] / max(1, lacking[role]))
        left[role] -= 1
        needed = gpus_of_role(observation, role)
        if needed <= free:
            free -= needed
            worker_id = f"{role}{of_model}-{next_number + len(actions)}"
            actions.append(Action("add", worker_id, role, f"{role} needs more than it has"))
    return actions


def given_up(now: Situation) -> list[Action]:
    """Removes workers that did not become ready by their deadline, which frees their GPUs."""
    return [
        Action("remove", worker.worker_id, worker.role, "it was not ready by its deadline")
        for worker in now.observation.workers
        if worker.worker_id in now.failed and worker.state == "starting" and free_to_change(worker)
        and "remove" in now.observation.verbs
    ]  # fmt: skip


def _leaving_order(now: Situation, role: Role) -> list[WorkerView]:
    """Workers of the role that may leave: first those that still start, the newest first, then those with the fewest
    tokens left to finish."""
    workers = [
        worker for worker in now.observation.workers
        if worker.role == role and worker.state in ("starting", "ready") and not worker.held
        and not (worker.state == "starting" and worker.worker_id in now.failed)
        and (worker.effect is None or (worker.effect in COMING and worker.state == "starting"))
    ]  # fmt: skip
    return sorted(
        workers,
        key=lambda worker: (
            worker.state == "ready",
            -worker.since_s if worker.state == "starting" else 0.0,
            worker.context_tokens + worker.queued_prefill_tokens,
            worker.worker_id,
        ),
    )


def _taken_away(worker: WorkerView, observation: Observation, sleeps: bool) -> Action | None:
    if not free_to_change(worker):
        return None  # its start is in flight; it can leave when it is ready
    if sleeps:
        return Action("sleep", worker.worker_id, worker.role, f"{worker.role} has more than it needs; kept for a burst")
    if worker.state == "starting":
        if "remove" not in observation.verbs:
            return None
        return Action(
            "remove", worker.worker_id, worker.role, f"{worker.role} has more than it needs; it serves nobody yet"
        )
    if "drain" not in observation.verbs:
        return None
    return Action("drain", worker.worker_id, worker.role, f"{worker.role} has more than it needs")
