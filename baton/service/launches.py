"""The launches that a configuration asks for: NATS, the routers, and the workers, one or many in a process."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from baton.service.children import Children
from baton.service.launcher import Launch
from baton.service.nats_server import NATS
from baton_proto.planner import ROLES, Role
from runtime.checkpoint.served_model import is_mock
from runtime.config.external import ExternalWorkerConfig
from runtime.config.serving import ServingConfig, for_prefill_worker
from runtime.config.workers import WorkerEngine
from runtime.errors import ConfigError
from runtime.security.nats_login import split_url

ROUTER = "router"  # the module
ROUTER_ID = "router-1"  # the first one
MAY_DIFFER = {"nats", "workers", "planner", "ray", "logging"}  # from one supervisor of a service to the next


@dataclass(frozen=True, slots=True)
class Launches:
    config: ServingConfig  # with the NATS URL, for all but NATS itself
    keys: dict[str, str]  # variables that each process gets
    children: Children

    def nats(self) -> Launch:
        return Launch(NATS, NATS, self.config, keys=self.keys)

    def router(self, name: str) -> Launch:
        return Launch(name, ROUTER, self.config, ["--router-id", name], keys=self.keys)

    def worker(self, role: Role, worker_id: str, engine: WorkerEngine | None = None) -> Launch:
        """`engine` None: what keeps the role's proportions."""
        engine = engine or self.config.workers.next_engine(role, self.children.engines(role))
        ranks = (for_prefill_worker(self.config) if role == "prefill" else self.config).engine.tensor_parallel
        arguments = ["--worker-id", worker_id]
        return Launch(
            worker_id, f"{role}_worker", self._config_of(engine), arguments, {worker_id: role}, ranks, self.keys
        )

    def missing(self) -> Iterator[Launch]:
        """What is not there yet. Where a planner has been at work, it knows better how many workers there should be."""
        yield from (self.router(name) for name in router_ids(self.config) if name not in self.children)
        if self.children.had_workers and self.config.planner.enabled:
            return
        for external in self.config.external_workers:
            if self.children.living(external.name) is None:
                yield self._external(external)
        lacking = [(role, engine) for role in ROLES for engine in self._lacking(role).elements()]
        size = self._workers_per_process
        if size == 1:
            yield from (self.worker(role, self.children.new_id(role), engine) for role, engine in lacking)
        else:
            roles = [role for role, _ in lacking]
            yield from (self._many(roles[start : start + size]) for start in range(0, len(roles), size))

    def _external(self, external: ExternalWorkerConfig) -> Launch:
        """An external worker takes no GPU and computes nothing: our own environment is enough."""
        name, role = external.name, external.worker_role
        arguments = ["--worker-id", name]
        return Launch(name, f"{role}_worker", self._config_of("baton"), arguments, {name: role}, 0, self.keys)

    def _lacking(self, role: Role) -> Counter[WorkerEngine]:
        return Counter(self.config.workers.by_engine(role)) - self.children.engines(role)

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
        workers = {self.children.new_id(role): role for role in roles}
        name = self.children.new_id("workers")
        arguments = ["--name", name, *workers]
        return Launch(name, "baton.service.many_workers", self._config_of("baton"), arguments, workers, 1, self.keys)


def router_ids(config: ServingConfig) -> list[str]:
    """The names of the routers, ROUTER_ID first."""
    return [f"router-{number}" for number in range(1, config.router.replicas + 1)]


def check_alike(config: ServingConfig, launch: Launch) -> None:
    """Raises ConfigError when a process that lives was started with another configuration, but for MAY_DIFFER."""
    ours, theirs = msgspec.to_builtins(config), msgspec.to_builtins(launch.config)
    for key in ours.keys() - MAY_DIFFER:
        if ours[key] != theirs[key]:
            raise ConfigError(key, f"{launch.name} lives, and was started with another one; end the service first")


def with_nats_url(config: ServingConfig, url: str) -> ServingConfig:
    return msgspec.structs.replace(config, nats=msgspec.structs.replace(config.nats, url=url))


def without_login(config: ServingConfig) -> ServingConfig:
    """What may be written down: a login in the URL of NATS goes to the processes as variables."""
    return config if config.nats.url is None else with_nats_url(config, split_url(config.nats.url)[0])
