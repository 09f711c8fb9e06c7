"""Which processes a roll-out replaces, and how many workers it starts for them."""

from collections import Counter
from typing import Any, cast

import pytest

from baton.service.children import Children
from baton.service.launcher import Generation
from baton.service.launches import Launches
from baton.service.rolling.plan import Plan, Source, living, plan, refuse, rows
from baton_proto.rollout import Code
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError
from runtime.processes.process import Process

FIRST, NEXT = Source(Code("1"), {"default": "w", "default--a": "w", "default--b": "w"}), Code("2")
TWO = [{"name": "a", "model": "/a"}, {"name": "b", "model": "/b"}]


class Living:
    alive = True
    stopping = False


def service(**sections: Any) -> tuple[ServingConfig, Children]:
    model = {} if "models" in sections else {"model": "a"}
    config, children = with_overrides(ServingConfig(), model | sections), Children()
    for launch in list(Launches(config, {}, children).missing()):
        children.add(launch, cast(Process, Living()))
    return config, children


def planned(
    children: Children,
    config: ServingConfig,
    changes: dict[str, Any],
    code: Code | None = None,
    weights: dict[str, str] | None = None,
) -> Plan:
    generation = Generation(2, code, weights or {})
    return plan(children, with_overrides(config, changes), generation, FIRST, living(children))


def lacking(found: Plan, place: str = "default") -> dict[str, int]:
    return {role: counts.total() for role, counts in found.lacking[place].items()}


def test_nothing_is_done_where_all_is_as_wanted() -> None:
    config, children = service(router={"replicas": 2}, workers={"prefill": 1, "decode": 2})
    found = planned(children, config, {})
    assert (found.old, found.old_routers, found.new_routers, lacking(found)) == ({}, {}, 0, {"prefill": 0, "decode": 0})


def test_processes_that_read_a_key_that_changed_are_replaced() -> None:
    config, children = service(router={"replicas": 2}, workers={"prefill": 1, "decode": 2})
    found = planned(children, config, {"engine": {"max_running": 3}})
    assert found.old == dict.fromkeys(["prefill-1", "decode-1", "decode-2"], "engine.max_running 64 -> 3")
    assert (found.old_routers, lacking(found)) == ({}, {"prefill": 1, "decode": 2})
    found = planned(children, config, {"router": {"queue_limit": 3, "replicas": 1}})
    assert (found.old, [*found.old_routers], found.new_routers) == ({}, ["router-1", "router-2"], 1)
    found = planned(children, config, {}, NEXT)
    assert {*found.old.values(), *found.old_routers.values()} == {"code 1 -> 2"}
    assert len(found.old) + len(found.old_routers) == 5
    found = planned(children, config, {}, weights={"default": "other files"})
    assert {*found.old.values(), *found.old_routers.values()} == {"model: its files are others than at the start"}


def test_workers_come_and_go_with_their_counts() -> None:
    config, children = service(workers={"prefill": 1, "decode": 2})
    found = planned(children, config, {"workers": {"prefill": 2, "decode": 1}})
    assert ([*found.old], lacking(found)) == (["decode-2"], {"prefill": 1, "decode": 0})


def test_a_planner_s_workers_are_replaced_one_for_one() -> None:
    config, children = service(planner={"enabled": True}, workers={"prefill": 1, "decode": 1})
    for _ in range(2):
        children.add(
            Launches(config, {}, children).worker("decode", children.new_id("decode")), cast(Process, Living())
        )
    assert lacking(planned(children, config, {})) == {"prefill": 0, "decode": 0}
    assert lacking(planned(children, config, {"engine": {"max_running": 3}})) == {"prefill": 1, "decode": 3}


def test_a_planner_s_workers_are_as_many_as_before_where_a_roll_out_goes_back_midway() -> None:
    config, children = service(planner={"enabled": True}, workers={"prefill": 1, "decode": 2})
    lived, changed = living(children), with_overrides(config, {"engine": {"max_running": 3}})
    for _ in range(2):
        launch = Launches(changed, {}, children).worker("decode", children.new_id("decode"))
        children.add(launch, cast(Process, Living()))
    found = plan(children, config, Generation(), FIRST, lived)
    assert ([*found.old], lacking(found)) == (["decode-3", "decode-4"], {"prefill": 0, "decode": 0})


def test_workers_that_share_a_process_go_together() -> None:
    config, children = service(model="mock", workers={"prefill": 1, "decode": 2})
    found = planned(children, config, {"workers": {"decode": 1}})
    assert ([*found.old], lacking(found)) == (["workers-1"], {"prefill": 1, "decode": 1})


def test_an_external_worker_changes_with_its_own_section() -> None:
    one: dict[str, Any] = {"name": "gpu-7", "address": "http://h:1", "events": "tcp://h:2", "replay": "tcp://h:3"}
    config, children = service(workers={"prefill": 0, "decode": 1}, external_workers=[one, one | {"name": "gpu-8"}])
    assert not planned(children, config, {}).old
    changed = [one | {"address": "http://h:9"}, one | {"name": "gpu-8"}]
    found = planned(children, config, {"external_workers": changed})
    assert (found.external, [*found.old_routers]) == (("gpu-7",), ["router-1"])
    assert found.lacking == {"default": {"prefill": Counter({"baton": 0}), "decode": Counter()}}


def test_a_change_of_one_model_replaces_its_workers_alone_and_the_routers_where_they_read_it() -> None:
    config, children = service(models=TWO)
    ended: dict[str, tuple[list[str], int]] = {}
    for name, change in {
        "nothing": {},
        "of workers": {"engine": {"max_running": 3}},
        "of all": {"model": "/c"},
        "of routers": {"aliases": ["bee"]},
        "a count": {"decode": 2},
    }.items():
        found = planned(children, config, {"models": [TWO[0], TWO[1] | change]})
        ended[name] = ([*found.old], len(found.old_routers))
        assert set(lacking(found, "default--a").values()) == {0}, name
    both = ["prefill-b-1", "decode-b-1"]
    assert ended == {
        "nothing": ([], 0),
        "of workers": (both, 0),
        "of all": (both, 1),
        "of routers": ([], 1),
        "a count": ([], 0),
    }
    assert lacking(found, "default--b") == {"prefill": 0, "decode": 1}
    found = planned(children, config, {}, weights=FIRST.weights | {"default--b": "other files"})
    assert found.old == dict.fromkeys(both, "model: its files are others than at the start")
    assert [*found.old_routers.values()] == ["models[b].model: its files are others than at the start"]


def test_an_external_worker_that_moves_to_another_model_ends_before_it_begins_there() -> None:
    server: dict[str, Any] = {"name": "gpu-7", "address": "http://h:1", "events": "tcp://h:2", "replay": "tcp://h:3"}
    with_server = {"external_workers": [server], "prefill": 0, "decode": 0}
    config, children = service(models=[TWO[0], TWO[1] | with_server])
    assert planned(children, config, {"models": [TWO[0]]}).external == ()
    third = {"name": "c", "model": "/c"} | with_server
    found = planned(children, config, {"models": [TWO[0], third]}, weights=FIRST.weights | {"default--c": "w"})
    assert (found.external, found.unserved) == (("gpu-7",), ["gpu-7"])


def test_a_model_s_last_workers_end_after_the_routers_and_a_new_one_s_begin_before_them() -> None:
    config, children = service(models=TWO)
    third = {"name": "c", "model": "/c"}
    found = planned(children, config, {"models": [TWO[0], third]}, weights=FIRST.weights | {"default--c": "w"})
    assert ([*found.old], found.unserved) == ([], ["prefill-b-1", "decode-b-1"])
    assert [*found.old_routers.values()] == ["models[b] /b -> null, models[c] null -> /c"]
    assert lacking(found, "default--c") == {"prefill": 1, "decode": 1}
    shown = rows(found, config, with_overrides(config, {"models": [TWO[0], third]}))
    assert [row.process for row in shown if row.what.startswith("new, with")] == ["1 prefill of c", "1 decode of c"]


@pytest.mark.parametrize(
    ("models", "key"),
    [
        ([TWO[0], TWO[1] | {"engine": {"block_size": 32}}], r"models\[b\]\.engine\.block_size"),
        ([], "models"),
    ],
)
def test_what_cannot_change_of_one_model_is_refused(models: list[dict[str, Any]], key: str) -> None:
    config, _ = service(models=TWO)
    with pytest.raises(ConfigError, match=f"^{key}.*`baton down` and `baton up`"):
        refuse(config, with_overrides(config, {"models": models}))
