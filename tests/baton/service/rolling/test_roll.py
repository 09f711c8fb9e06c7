"""In which order a roll-out starts and ends processes, and what it leaves when one does not become ready."""

from collections.abc import Iterable
from typing import Any, cast

import pytest

from baton.service.children import Children
from baton.service.launcher import Generation, Launch, Launcher
from baton.service.launches import Launches
from baton.service.rolling.plan import Source
from baton.service.rolling.roll import roll_out
from baton.service.supervisor import Supervisor
from baton_proto.rollout import Code
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.processes.process import Process, ProcessFailedError

FIRST = Source(Code("1"), "")
WANTED = {"engine": {"max_running": 5}}


class Fake:
    """A process, a launcher, and the supervisor of both. `log` has +NAME and -NAME; `bad` does not become ready."""

    def __init__(self, room: int, bad: str = "", replicas: int = 1) -> None:
        sections = {"workers": {"prefill": 1, "decode": 2}, "router": {"replicas": replicas}}
        self.config = with_overrides(ServingConfig(model="a"), sections)
        self.generation = Generation()
        self.children = Children()
        self.log: list[str] = []
        self.launcher = cast(Launcher, self)
        self.router_addresses = {"grpc": "h:1"}
        self._room = room  # for workers
        for launch in list(self.launches.missing()):
            self.children.add(launch, cast(Process, Lives(self)))
        self._bad = bad

    @property
    def launches(self) -> Launches:
        return Launches(self.config, {}, self.children, self.generation)

    @property
    def living(self) -> list[str]:
        return sorted(self.children.living_of())

    async def has_room(self, launch: Launch) -> bool:
        return sum(name not in self.children.routers for name in self.living) < self._room

    async def add(self, launch: Launch) -> None:
        process = Lives(self)
        self.children.add(launch, cast(Process, process))
        self.log.append(f"+{launch.name}")
        if launch.name == self._bad:
            raise ProcessFailedError(launch.name, "exited with code 1 before it was ready", "its last words")

    async def stop_process(self, name: str) -> bool:
        self.log.append(f"-{name}")
        cast(Lives, self.children[name]).alive = False
        return True

    async def until_used(self, names: Iterable[str]) -> None: ...

    def own_serving(self) -> list[str]:
        return []

    def set_log_level(self, level: str) -> None: ...

    def reopen_logs(self) -> None: ...

    def client(self) -> Any:
        return NoRouter()


class NoRouter:
    """All workers are awake."""

    async def __aenter__(self) -> "NoRouter":
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def status(self, timeout_s: float) -> Any:
        return type("Status", (), {"workers": []})


class Lives:
    def __init__(self, fake: Fake) -> None:
        self.alive = True
        self.stopping = False

    async def kill(self) -> None:
        self.alive = False


async def rolled(fake: Fake, changes: dict[str, Any]) -> str:
    config = with_overrides(fake.config, changes)
    await roll_out(cast(Supervisor, fake), config, Generation(2), FIRST, lambda line, **fields: None)
    return " ".join(fake.log)


async def test_where_there_is_room_all_new_workers_serve_before_an_old_one_ends() -> None:
    done = await rolled(Fake(room=9), WANTED)
    assert done == "+decode-3 +decode-4 +prefill-2 -prefill-1 -decode-1 -decode-2"


async def test_as_many_new_workers_come_first_as_find_room() -> None:
    done = await rolled(Fake(room=4), WANTED)
    assert done == "+decode-3 -prefill-1 +decode-4 -decode-1 +prefill-2 -decode-2"
    done = await rolled(Fake(room=3), WANTED)
    assert done == "-prefill-1 +decode-3 -decode-1 +decode-4 -decode-2 +prefill-2"


async def test_each_router_is_replaced_by_one_beside_it() -> None:
    done = await rolled(Fake(9, replicas=2), {"router": {"queue_limit": 3}})
    assert done == "+router-3 -router-1 +router-4 -router-2"
    assert await rolled(Fake(9, replicas=2), {"router": {"replicas": 1}}) == "+router-3 -router-1 -router-2"


@pytest.mark.parametrize(
    ("room", "bad", "done"),
    [
        (9, "decode-4", "+decode-3 +decode-4 -decode-3"),
        (3, "decode-4", "-prefill-1 +decode-3 -decode-1 +decode-4 +decode-5 -decode-3 +prefill-3"),
    ],
)
async def test_when_a_new_worker_does_not_become_ready_the_service_is_what_it_was(
    room: int, bad: str, done: str
) -> None:
    fake = Fake(room, bad)
    before, config = len(fake.living), fake.config
    with pytest.raises(ProcessFailedError, match="its last words"):
        await rolled(fake, WANTED)
    assert " ".join(fake.log) == done
    assert (len(fake.living), fake.config, fake.generation.number) == (before, config, 1)
    assert {fake.children.launches[name].config.engine.max_running for name in fake.living} == {64}
