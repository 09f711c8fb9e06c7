"""Which processes a configuration asks for, with engines that somebody else starts."""

from typing import Any, cast

from baton.service.children import Children
from baton.service.launcher import Launch
from baton.service.launches import Launches
from runtime.config.serving import ServingConfig, parse_config
from runtime.processes.process import Process


class Living:
    alive = True


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
