"""What a roll-out does to the processes of a service. Pure: processes as they are and what is wanted go in, steps come
out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.service.children import Children
from baton.service.launcher import ROUTER, Generation, Launch
from baton.service.launches import configs_for, differences
from baton.service.wanted.effects import MODELS, RESTART, changes, effect_of
from baton_proto.planner import ROLES, Role
from baton_proto.rollout import Code, Row
from runtime.config.models import models_of
from runtime.config.serving import ServingConfig
from runtime.config.workers import WorkerEngine
from runtime.errors import ConfigError

SUPERVISOR = "supervisor"


@dataclass(frozen=True, slots=True)
class Plan:
    """`old`: processes of workers that go, with the reason. `unserved`: those that go after the routers, because their
    model is served until then. `lacking`: workers that are started, by their model's namespace, role and engine.
    `external`: those of them that engines elsewhere are behind, and whose names are needed again."""

    old: Mapping[str, str]
    unserved: Sequence[str]
    old_routers: Mapping[str, str]
    lacking: Mapping[str, Mapping[Role, Counter[WorkerEngine]]]
    external: tuple[str, ...]
    new_routers: int


@dataclass(frozen=True, slots=True)
class Source:
    """What processes are started from, beside their configuration."""

    code: Code
    weights: Mapping[str, str]  # the state of each model's files, by namespace

    def of(self, generation: Generation) -> "Source":
        """Of a generation, which leaves out what is as it was when the supervisor started: `self`."""
        return Source(generation.code or self.code, generation.weights or self.weights)


def living(children: Children) -> Mapping[tuple[str, Role], int]:
    """How many workers of each model's namespace and role live, those that are being started included."""
    places = {(launch.config.namespace, role) for launch in children.launches.values() for role in ROLES}
    return Counter({(place, role): children.engines(role, place).total() for place, role in places})


def plan(
    children: Children,
    config: ServingConfig,
    generation: Generation,
    first: Source,
    lived: Mapping[tuple[str, Role], int],
) -> Plan:
    """`first`: when the supervisor started. `lived`: what `living` said when the roll-out began."""
    source = first.of(generation)
    lasting = [name for name in children.living_of() if not children[name].stopping]
    configs = configs_for([children.launches[name] for name in lasting], config)
    why = {name: _why_outdated(children.launches[name], its, source, first) for name, its in configs.items() if its}
    kept = [name for name in why if not why[name]]
    old = {name: reason for name, reason in why.items() if reason}
    routers = {name: old.pop(name) for name in children.routers if name in old}
    beyond = [name for name in kept if name in children.routers][config.router.replicas :]
    routers |= dict.fromkeys(beyond, "router.replicas")
    kept_routers = sum(name in children.routers for name in kept) - len(beyond)
    workers = [name for name in kept if name not in children.routers and not _external(children.launches[name])]
    lacking: dict[str, Mapping[Role, Counter[WorkerEngine]]] = {}
    for model in models_of(config):
        own = [name for name in workers if children.launches[name].config.namespace == model.namespace]
        counts = _wanted(lived, model)
        for name in list(reversed(own)):
            roles = children.launches[name].workers.values()
            if any(not _counts(children, own, role) <= counts[role] for role in roles):
                own.remove(name)
                old[name] = "there are more workers than wanted"
        lacking[model.namespace] = {role: counts[role] - _counts(children, own, role) for role in ROLES}
    unserved = [name for name, its in configs.items() if its is None]
    moved = {one.name for model in models_of(config) for one in model.external_workers} & {*unserved}
    external = tuple(name for name in (*old, *moved) if _external(children.launches[name]))
    return Plan(old, unserved, routers, lacking, external, config.router.replicas - kept_routers)


def rows(plan: Plan, before: ServingConfig, after: ServingConfig) -> list[Row]:
    """The table that is shown. Empty: nothing changes."""
    in_place = [change for change in changes(before, after) if not effect_of(change.key).processes]
    told = [Row(SUPERVISOR, "changes in place", str(change)) for change in in_place]
    told += [Row(name, "ends; its place is taken first where there is room", why) for name, why in plan.old.items()]
    names = {one.namespace: f" of {one.served_model_name}" for one in models_of(after) if after.models}
    told += [
        Row(
            f"{count} {role}{'s' * (count > 1)}{names.get(place, '')}",
            f"new, with {engine}",
            "takes the place of others, or is one more",
        )
        for place, roles in plan.lacking.items()
        for role, engines in roles.items()
        for engine, count in engines.items()
    ]
    told += [Row(name, "hands its ports over", why) for name, why in plan.old_routers.items()]
    if plan.new_routers:
        told.append(Row(f"{plan.new_routers} {ROUTER}" + "s" * (plan.new_routers > 1), "new, on the same ports", ""))
    told += [Row(name, "ends after the routers", "its model is served no more") for name in plan.unserved]
    return told


def refuse(before: ServingConfig, after: ServingConfig) -> None:
    """Raises ConfigError for what cannot change while the service runs."""
    if bool(before.models) != bool(after.models):
        raise ConfigError("models", f"one `model` and a list of `models` have other workers: {RESTART}")
    for change in changes(before, after):
        if refusal := effect_of(change.key).refusal:
            raise ConfigError(change.key, f"({change}) {refusal}")


def _why_outdated(launch: Launch, config: ServingConfig, source: Source, first: Source) -> str:
    """Empty: it is as it should be."""
    changed = differences(launch, config)
    found = [*map(str, changed)]
    found += [f"external_workers.{name}" for name in launch.workers if _other(name, launch, config)]
    its = first.of(launch.generation)
    if its.code.version != source.code.version:
        found.append(f"code {its.code.version} -> {source.code.version}")
    for model in models_of(config):
        key = f"{MODELS}{model.served_model_name}].model" if config.models else "model"
        before = its.weights.get(model.namespace)
        if before not in (None, source.weights[model.namespace]) and key not in [change.key for change in changed]:
            found.append(f"{key}: its files are others than at the start")
    return ", ".join(found)


def _external(launch: Launch) -> bool:
    return any(launch.config.external_worker(name) is not None for name in launch.workers)


def _other(name: str, launch: Launch, config: ServingConfig) -> bool:
    return launch.config.external_worker(name) != config.external_worker(name)


def _counts(children: Children, names: list[str], role: Role) -> Counter[WorkerEngine]:
    launches = (children.launches[name] for name in names)
    return Counter(
        launch.config.workers.engine for launch in launches for its in launch.workers.values() if its == role
    )


def _wanted(lived: Mapping[tuple[str, Role], int], config: ServingConfig) -> dict[Role, Counter[WorkerEngine]]:
    """How many workers there shall be. Where there is a planner: as many as lived, because it knows better."""
    if not config.planner.enabled:
        return {role: Counter(config.workers.by_engine(role)) for role in ROLES}
    wanted: dict[Role, Counter[WorkerEngine]] = {}
    for role in ROLES:
        engines = wanted[role] = Counter[WorkerEngine]()
        for _ in range(lived[config.namespace, role]):
            engines[config.workers.next_engine(role, engines)] += 1
    return wanted
