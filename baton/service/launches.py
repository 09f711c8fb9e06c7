"""The launches that a configuration asks for: NATS, one router, and the workers, one or many in a process."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from baton.service.children import Children
from baton.service.launcher import Launch, Role
from baton.service.nats_server import NATS
from runtime.checkpoint.served_model import is_mock
from runtime.config.serving import ServingConfig, for_prefill_worker
from runtime.errors import ConfigError
from runtime.security.nats_login import split_url

ROUTER_ID = "router-1"
MAY_DIFFER = {"nats", "workers", "planner", "ray", "logging"}  # from one supervisor of a service to the next


@dataclass(frozen=True, slots=True)
class Launches:
    config: ServingConfig  # with the NATS URL, for all but NATS itself
    keys: dict[str, str]  # variables that each process gets
    children: Children

    def nats(self) -> Launch:
        return Launch(NATS, NATS, self.config, keys=self.keys)

    def worker(self, role: Role, worker_id: str) -> Launch:
        ranks = (for_prefill_worker(self.config) if role == "prefill" else self.config).engine.tensor_parallel
        arguments = ["--worker-id", worker_id]
        return Launch(worker_id, f"{role}_worker", self.config, arguments, {worker_id: role}, ranks, self.keys)

    def missing(self) -> Iterator[Launch]:
        """What is not there yet. Where a planner has been at work, it knows better how many workers there should be."""
        if ROUTER_ID not in self.children:
            yield Launch(ROUTER_ID, "router", self.config, ["--router-id", ROUTER_ID], keys=self.keys)
        if self.children.had_workers and self.config.planner.enabled:
            return
        for external in self.config.external_workers:
            if self.children.living(external.name) is None:
                yield self._external(external.name)
        wanted: dict[Role, int] = {"prefill": self.config.workers.prefill, "decode": self.config.workers.decode}
        roles = [role for role, count in wanted.items() for _ in range(count - self._count(role))]
        size = self._workers_per_process
        if size == 1:
            yield from (self.worker(role, self.children.new_id(role)) for role in roles)
        else:
            yield from (self._many(roles[start : start + size]) for start in range(0, len(roles), size))

    def _external(self, name: str) -> Launch:
        """It takes no GPU, and computes nothing."""
        return Launch(name, "decode_worker", self.config, ["--worker-id", name], {name: "decode"}, 0, self.keys)

    def _count(self, role: Role) -> int:
        """Of living workers whose engines are our own."""
        return sum(self.config.external_worker(name) is None for name in self.children.workers(role))

    @property
    def _workers_per_process(self) -> int:
        workers = self.config.workers
        if self.config.planner.enabled:
            return 1  # the planner ends workers one by one
        return workers.per_process or (max(1, workers.prefill + workers.decode) if is_mock(self.config) else 1)

    def _many(self, roles: Sequence[Role]) -> Launch:
        """All in one process."""
        workers = {self.children.new_id(role): role for role in roles}
        name = self.children.new_id("workers")
        arguments = ["--name", name, *workers]
        return Launch(name, "baton.service.many_workers", self.config, arguments, workers, 1, self.keys)


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
