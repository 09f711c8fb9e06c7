"""Which processes a configuration asks for, with several engines and with engines that somebody else starts."""

from collections import Counter
from typing import Any, cast

import msgspec

from baton.service.children import Children
from baton.service.launcher import Launch
from baton.service.launches import Launches
from runtime.config.serving import ServingConfig, parse_config
from runtime.processes.process import Process


class Living:
    alive = True


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
