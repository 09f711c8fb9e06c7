"""Which processes a configuration asks for, with several engines and with engines that somebody else starts."""

import asyncio
from collections import Counter
from typing import Any, cast

import msgspec
import pytest

from baton.service.children import Children
from baton.service.launcher import Launch, Launcher
from baton.service.launches import Launches
from baton.service.supervisor import Supervisor
from engine.vllm.arguments import shares_kv
from runtime.config.serving import ServingConfig, parse_config
from runtime.processes.process import Process


class Living:
    alive = True
    stopping = False


class Dead:
    alive = False


def config(decode: int) -> ServingConfig:
    worker: dict[str, Any] = {"address": "http://h:1", "events": "tcp://h:2", "replay": "tcp://h:3"}
    workers = [worker | {"name": name} for name in ("gpu-7", "gpu-8")]
    return parse_config({"external_workers": workers, "workers": {"prefill": 0, "decode": decode}})


def missing(decode: int, children: Children) -> list[Launch]:
    return list(Launches(config(decode), {}, children).missing())


def test_each_external_worker_has_a_process_that_takes_no_gpu() -> None:
    launches = {launch.name: launch for launch in missing(1, Children())}
    assert launches.keys() == {"router-1", "gpu-7", "gpu-8", "decode-1"}
    assert (launches["gpu-7"].ranks, launches["decode-1"].ranks) == (0, 1)
    assert launches["gpu-7"].workers == {"gpu-7": "decode"}


def test_an_external_worker_for_prompts_is_a_prefill_worker() -> None:
    given = msgspec.to_builtins(config(0))
    given["external_workers"][0]["role"] = "prefill"
    launches = {launch.name: launch for launch in Launches(parse_config(given), {}, Children()).missing()}
    found = [(launches[name].module, launches[name].workers[name]) for name in ("gpu-7", "gpu-8")]
    assert found == [("prefill_worker", "prefill"), ("decode_worker", "decode")]


def test_external_workers_that_live_are_not_taken_for_ours() -> None:
    children = Children()
    for launch in missing(0, children):
        children.add(launch, cast(Process, Living()))
    assert [launch.name for launch in missing(0, children)] == []
    assert [launch.name for launch in missing(2, children)] == ["decode-1", "decode-2"]


def living_of(given: dict[str, Any]) -> tuple[ServingConfig, Children]:
    """A service whose workers have all been started."""
    config, children = parse_config(given), Children()
    for launch in Launches(config, {}, children).missing():
        children.add(launch, cast(Process, Living()))
    return config, children


MIXED = {"workers": {"prefill": {"vllm": 1}, "decode": {"baton": 1, "vllm": 2}}}


def test_each_worker_of_a_mixed_service_is_started_with_its_own_engine() -> None:
    launches = Launches(parse_config(MIXED), {}, Children()).missing()
    engines = {launch.name: launch.config.workers.engine for launch in launches if launch.workers}
    assert engines == {"prefill-1": "vllm", "decode-1": "baton", "decode-2": "vllm", "decode-3": "vllm"}


def test_a_lost_worker_is_missed_by_its_engine() -> None:
    config, children = living_of(MIXED)
    children["decode-3"] = cast(Process, Dead())
    (launch,) = Launches(config, {}, children).missing()
    assert (launch.name, launch.config.workers.engine) == ("decode-4", "vllm")


def test_workers_that_a_planner_adds_keep_the_proportions_of_their_role() -> None:
    config, children = living_of(MIXED)
    for number in range(4, 8):
        launch = Launches(config, {}, children).worker("decode", f"decode-{number}")
        children.add(launch, cast(Process, Living()))
        children[launch.name] = cast(Process, Living())
    engines = Counter(map(children.engine, children.workers("decode")))
    assert engines == {"baton": 2, "vllm": 5}
    assert Launches(config, {}, children).worker("prefill", "prefill-2").config.workers.engine == "vllm"


class Launching:
    """A launcher whose processes never get further than the begin of their start."""

    def __init__(self) -> None:
        self.launches = asyncio.Queue[Launch]()

    def here(self, config: ServingConfig) -> ServingConfig:
        return config

    def release(self, process: object) -> None: ...

    def place(self, process: object) -> list[str]:
        return []

    def process(self, launch: Launch) -> Process:
        self.launches.put_nowait(launch)
        return cast(Process, Unborn())


class Unborn(Dead):
    async def start(self) -> None:
        await asyncio.Event().wait()


async def test_workers_that_a_planner_adds_at_once_keep_the_proportions_too() -> None:
    launcher = Launching()
    config = parse_config({"workers": {"decode": {"baton": 1, "vllm": 2}}})
    supervisor = Supervisor(config, launcher=cast(Launcher, launcher))
    adding = [asyncio.create_task(supervisor.add_worker("decode")) for _ in range(6)]
    engines = Counter([(await launcher.launches.get()).config.workers.engine for _ in adding])
    for task in adding:
        task.cancel()
    await asyncio.gather(*adding, return_exceptions=True)
    assert engines == {"baton": 2, "vllm": 4}
    assert not supervisor.children.engines("decode")


PLANNED = {"planner": {"enabled": True, "limits": {"max_prefill": 2}}}


@pytest.mark.parametrize(
    ("prefill", "engine", "shares"),
    [(0, "baton", False), ({"vllm": 0}, "vllm", True), ({"baton": 0, "vllm": 0}, "baton", False)],
)
def test_a_role_without_workers_gets_one_engine_in_each_process(prefill: Any, engine: str, shares: bool) -> None:
    given = PLANNED | {"workers": {"prefill": prefill, "decode": {"baton": 1, "vllm": 1}}}
    config = parse_config(given)
    for workers in (config.workers, config.workers.of("vllm"), config.workers.of("baton")):
        process = msgspec.structs.replace(config, workers=workers)
        assert process.workers.by_engine("prefill") == {engine: 0}
        assert shares_kv(process) == shares
    assert Launches(config, {}, Children()).worker("prefill", "prefill-1").config.workers.engine == engine


def test_a_service_that_begins_without_workers_uses_the_engines_that_its_roles_name() -> None:
    config = parse_config({"workers": {"prefill": {"vllm": 0}, "decode": {"vllm": 0}}})
    assert (config.uses("vllm"), config.uses("baton")) == (True, False)


def test_a_worker_with_our_engine_does_not_count_prefill_workers_with_vllm_as_its_own() -> None:
    config, _ = living_of({"workers": {"engine": "vllm", "prefill": 2, "decode": {"baton": 1, "vllm": 1}}})
    launches = {launch.name: launch for launch in Launches(config, {}, Children()).missing()}
    assert launches["decode-1"].config.workers.engine == "baton"
    assert launches["decode-1"].config.workers.by_engine("prefill") == {"vllm": 2}


def test_an_external_worker_needs_our_own_environment_alone() -> None:
    given = msgspec.to_builtins(config(1))
    given["workers"] |= {"engine": "vllm"}
    launches = {launch.name: launch for launch in Launches(parse_config(given), {}, Children()).missing()}
    assert (launches["gpu-7"].config.workers.engine, launches["decode-1"].config.workers.engine) == ("baton", "vllm")
