"""The launches that a configuration asks for: NATS, the routers, and the workers, one or many in a process."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import msgspec

from baton.service.children import Children
from baton.service.launcher import NATS, ROUTER, Generation, Launch
from baton.service.wanted.effects import Change, changes, changes_for, effect_of
from baton_proto.planner import ROLES, Role
from runtime.checkpoint.served_model import is_mock
from runtime.config.external import ExternalWorkerConfig
from runtime.config.models import model_of, models_of
from runtime.config.serving import ServingConfig, for_prefill_worker
from runtime.config.workers import WorkerEngine
from runtime.errors import ConfigError
from runtime.security.nats_login import split_url

BESIDE = "--beside"  # of a router: others have its ports, too


@dataclass(frozen=True, slots=True)
class Launches:
    config: ServingConfig  # with the NATS URL, for all but NATS itself
    keys: dict[str, str]  # variables that each process gets
    children: Children
    generation: Generation = field(default_factory=Generation)
    model: str = ""  # as the ids of its workers have it; empty: there is one model

    @property
    def models(self) -> list[Self]:
        """Those of each model, whose workers know nothing of the others."""
        if not self.config.models:
            return [self]
        return [replace(self, config=model_of(self.config, model), model=model.slug) for model in self.config.models]

    def nats(self, name: str, routes: dict[str, str]) -> Launch:
        return Launch(name, NATS, self.config, keys=self.keys, routes=routes)

    def router(self, name: str | None = None, addresses: Mapping[str, str] | None = None) -> Launch:
        """`name` None: a new one. `addresses`: those of the routers, whose ports it takes or shares."""
        name, beside = name or self.children.new_id(ROUTER), bool(addresses and self.children.routers)
        arguments = ["--router-id", name, *([BESIDE] if beside else [])]
        return self._of_us(Launch(name, ROUTER, self.config, arguments, addresses=dict(addresses or {})))

    def worker(self, role: Role, worker_id: str, engine: WorkerEngine | None = None) -> Launch:
        """`engine` None: what keeps the role's proportions."""
        engine = engine or self.config.workers.next_engine(role, self.children.engines(role, self.config.namespace))
        ranks = (for_prefill_worker(self.config) if role == "prefill" else self.config).engine.tensor_parallel
        arguments = ["--worker-id", worker_id]
        return self._of_us(
            Launch(worker_id, f"{role}_worker", self._config_of(engine), arguments, {worker_id: role}, ranks)
        )

    def missing(self) -> Iterator[Launch]:
        """What is not there yet. Where a planner has been at work, it knows better how many workers there should be."""
        yield from (self.router() for _ in range(self.config.router.replicas - len(self.children.routers)))
        for model in self.models:
            yield from model._missing_workers()

    def _missing_workers(self) -> Iterator[Launch]:
        for external in self.config.external_workers:
            if self.children.living(external.name) is None:
                yield self.external(external)
        if not (self.children.had_workers and self.config.planner.enabled):
            yield from self.workers({role: self._lacking(role) for role in ROLES})

    def workers(self, counts: Mapping[Role, Counter[WorkerEngine]]) -> Iterator[Launch]:
        """So many more, by role and engine."""
        lacking = [(role, engine) for role in ROLES for engine in counts[role].elements()]
        size = self._workers_per_process
        if size == 1:
            yield from (self.worker(role, self._new_id(role), engine) for role, engine in lacking)
        else:
            roles = [role for role, _ in lacking]
            yield from (self._many(roles[start : start + size]) for start in range(0, len(roles), size))

    def external(self, external: ExternalWorkerConfig) -> Launch:
        """An external worker takes no GPU and computes nothing: our own environment is enough."""
        name, role = external.name, external.worker_role
        arguments = ["--worker-id", name]
        return self._of_us(Launch(name, f"{role}_worker", self._config_of("baton"), arguments, {name: role}))

    def _lacking(self, role: Role) -> Counter[WorkerEngine]:
        return Counter(self.config.workers.by_engine(role)) - self.children.engines(role, self.config.namespace)

    def _new_id(self, kind: str) -> str:
        return self.children.new_id(f"{kind}-{self.model}" if self.model else kind)

    def _config_of(self, engine: WorkerEngine) -> ServingConfig:
        """The configuration of a process whose workers have this engine."""
        return msgspec.structs.replace(self.config, workers=self.config.workers.of(engine))

    @property
    def _workers_per_process(self) -> int:
        workers = self.config.workers
        if self.config.planner.enabled:
            return 1  # the planner ends workers one by one
        return workers.per_process or (max(1, workers.total) if is_mock(self.config) else 1)

    def _many(self, roles: Sequence[Role]) -> Launch:
        """Puts all these workers into one process."""
        workers = {self._new_id(role): role for role in roles}
        name = self._new_id("workers")
        arguments = ["--name", name, *workers]
        return self._of_us(Launch(name, "baton.service.many_workers", self._config_of("baton"), arguments, workers, 1))

    def _of_us(self, launch: Launch) -> Launch:
        return msgspec.structs.replace(launch, keys=self.keys, generation=self.generation)


def configs_for(launches: Iterable[Launch], config: ServingConfig) -> dict[str, ServingConfig | None]:
    """What each process, by name, gets of the service's configuration: a worker that of its model; None: that is served
    no more."""
    models = {one.namespace: one for one in models_of(config)}
    return {one.name: config if one.module == ROUTER else models.get(one.config.namespace) for one in launches}


def differences(launch: Launch, config: ServingConfig) -> list[Change]:
    """Between what a process was started with and what it would be started with now, as far as it is read there.
    `config`: as `configs_for` has it."""
    if launch.module == ROUTER:
        return changes_for("router", launch.config, config)
    ours = msgspec.structs.replace(config, workers=config.workers.of(launch.config.workers.engine))
    found = {
        change.key: change for role in launch.workers.values() for change in changes_for(role, launch.config, ours)
    }
    return list(found.values())


def nats_names(config: ServingConfig) -> list[str]:
    """The names of the NATS servers that the service starts itself."""
    count = config.nats.servers
    return [NATS] if count == 1 else [f"{NATS}-{number}" for number in range(1, count + 1)]


def check_alike(config: ServingConfig, launch: Launch) -> None:
    """`config`: as `configs_for` has it. Raises ConfigError when a process that lives was started with another one."""
    fixed = [one for one in changes(launch.config, config) if effect_of(one.key).refusal and one.key[:5] != "nats."]
    for change in (*fixed, *differences(launch, config)):
        problem = f"{launch.name} lives, and was started with another one: {change}"
        raise ConfigError(change.key, f"{problem}; give that one, and then `baton rollout` for the new one")
    if config.nats.servers != launch.config.nats.servers:
        raise ConfigError("nats.servers", f"the service has {launch.config.nats.servers}; end it first")


def with_nats_url(config: ServingConfig, url: str) -> ServingConfig:
    return msgspec.structs.replace(config, nats=msgspec.structs.replace(config.nats, url=url))


def without_login(config: ServingConfig) -> ServingConfig:
    """What may be written down: a login in the URL of NATS goes to the processes as variables."""
    return config if config.nats.url is None else with_nats_url(config, split_url(config.nats.url)[0])
