"""A service on a Ray cluster of three nodes, by its commands: brought up, taken over, hit by a node's death, ended.

The tests share one cluster and follow each other.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import yaml

from baton.runs.run_file import find_operator_key, run_at
from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client
from tests.ray_cluster import HEAD_ADDRESS, ray_cluster
from tests.service import assert_gone

# The tests share a service; those that start and end it are quick.
pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

BATON = [sys.executable, "-m", "baton"]
COMMAND_S = 90.0
WAIT_S = 60.0
GONE_S = 12.0  # from a node's death until its workers are listed no more; Ray's own check takes 15 s
SETTINGS: dict[str, Any] = {
    "model": "mock",
    "router": {"http_port": 0, "grpc_port": 0, "placement": {"local_prefill_tokens": 0}},
    "workers": {"prefill": 1, "decode": 2, "drain_timeout_s": 10.0},
    "transfer": {"transport": "tcp"},
    "planner": {
        "enabled": True,
        "interval_s": 1.0,
        "limits": {"min_prefill": 1, "max_prefill": 1, "min_decode": 2, "max_decode": 2},
    },
}


class RayService:
    """The service of these tests. Each node has room for one worker."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.nodes = {
            address: cluster.add_node(num_cpus=1, node_ip_address=address) for address in ("127.0.0.3", "127.0.0.4")
        }
        self.pids: dict[str, int] = {}
        self.addresses: dict[str, dict[str, str]] = {}
        self.grpc = ""
        self.cluster = cluster
        self._config = folder / "serving.yaml"
        self._config.write_text(yaml.safe_dump(SETTINGS))

    def baton(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.baton_here(*arguments, "--address", self.cluster.address)

    def baton_here(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """A command that asks the service, and not the cluster."""
        return subprocess.run([*BATON, *arguments], capture_output=True, text=True, timeout=COMMAND_S)

    def up(self, *flags: str) -> "subprocess.CompletedProcess[str]":
        done = self.baton("up", "--ray", "--json", *flags, "--config", str(self._config))
        for line in map(json.loads, done.stdout.splitlines()):
            if line["event"] == "ready":
                self.pids[line["id"]] = line["pid"]
                self.addresses[line["id"]] = line["addresses"]
            if line["event"] == "serving":
                self.grpc = line["grpc"]
                self.operator_key = find_operator_key(run_at(self.grpc), {})
        return done

    def follow_logs(self) -> "Follower":
        command = [*BATON, "logs", "--follow", "--lines", "1", "--address", self.cluster.address]
        follower = Follower(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        follower.until("")
        return follower

    def node_of(self, worker_id: str) -> str:
        """The node's address."""
        return self.addresses[worker_id]["rpc"].rpartition(":")[0]

    async def ask(self, text: str) -> pb.ServedBy:
        """A prompt that is shipped. Who served it."""
        async with Client(self.grpc) as client:
            answer = await client.generate(pb.GenerateRequest(text=text * 40), WAIT_S)
        assert len(answer.token_ids) == 64
        return answer.served_by[0]

    async def newest(self) -> str:
        """A worker that `baton up` has not told of."""
        async with Client(self.grpc, operator_key=self.operator_key) as client:
            workers = (await client.status(WAIT_S)).workers
        (new,) = {one.worker_id for one in workers} - self.addresses.keys()
        return new

    async def until(self, condition: Callable[[dict[str, str]], bool], limit_s: float = WAIT_S) -> None:
        """`condition` gets the roles of the workers that the router uses."""
        async with Client(self.grpc, operator_key=self.operator_key) as client, asyncio.timeout(limit_s):
            while True:
                workers = (await client.status(WAIT_S)).workers
                if condition({w.worker_id: w.role for w in workers if w.state == "ready" and not w.note}):
                    return
                await asyncio.sleep(0.05)


class Follower:
    """`baton logs --follow`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def until(self, words: str) -> str:
        """The first line from now on that has these words."""
        assert self._process.stdout is not None
        return next(line for line in self._process.stdout if words in line)

    def end(self) -> str:
        """What it said on stderr."""
        self._process.send_signal(signal.SIGINT)
        _, said = self._process.communicate(timeout=WAIT_S)
        assert self._process.returncode == 130
        return said


def own_processes(name: str) -> list[psutil.Process]:
    """Processes of this cluster with that in their command lines."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment, command = process.info["environ"] or {}, " ".join(process.info["cmdline"] or [])
        if environment.get("RAY_TMPDIR") == os.environ["RAY_TMPDIR"] and name in command:
            found.append(process)
    return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayService]:
    with ray_cluster(head_cpus=1) as cluster:
        yield RayService(cluster, tmp_path_factory.mktemp("ray-service"))


@pytest.mark.slow
def test_where_nothing_serves_commands_say_so(service: RayService, monkeypatch: pytest.MonkeyPatch) -> None:
    done = service.baton("down")
    assert (done.returncode, done.stderr) == (3, "error: nothing serves 'default' on this cluster\n")
    done = service.baton("logs", "decode-1")
    assert done.returncode == 3
    assert done.stderr == "error: there is no log of 'decode-1'; those that are there: none\n"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    done = service.baton("down")
    assert done.returncode == 3
    assert "no Ray cluster at" in done.stderr


async def test_a_service_comes_up_on_all_nodes_and_the_command_returns(service: RayService) -> None:
    done = service.up()
    assert done.returncode == 0, done.stderr
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert events == ["ready"] * 5 + ["serving", "planner"]
    assert {service.node_of(worker_id) for worker_id in ("prefill-1", "decode-1", "decode-2")} == {
        HEAD_ADDRESS,
        *service.nodes,
    }
    served_by = await service.ask("hand over")
    assert (served_by.prefill_worker, served_by.transport) == ("prefill-1", "tcp")
    assert served_by.kv_blocks > 0
    done = service.up()
    assert done.returncode == 2
    assert "'default' is served on this cluster already" in done.stderr


@pytest.mark.slow
def test_the_log_of_each_process_is_shown_wherever_it_runs(service: RayService) -> None:
    for process, text in (("decode-1", "ready "), ("router-1", "router-1"), ("nats", "Server is ready")):
        done = service.baton("logs", process)
        assert done.returncode == 0, done.stderr
        assert text in done.stdout
    lines = service.baton("logs", "control", "--lines", "2").stdout.splitlines()
    assert len(lines) == 2
    done = service.baton("logs", "decode-7")
    assert done.returncode == 3
    assert "no log of 'decode-7'; those that are there: control, decode-1, decode-2, nats, prefill-1" in done.stderr


@pytest.mark.slow
def test_the_logs_of_all_nodes_are_shown_as_one_in_the_order_of_time(service: RayService) -> None:
    done = service.baton("logs", "--lines", "1000")
    assert done.returncode == 0, done.stderr
    for name in ("control", "router-1", "prefill-1", "decode-1", "decode-2"):
        assert f"process={name}" in done.stdout
    assert "Server is ready" in done.stdout
    times = re.findall(r"^(?:\[\d+\] [\d/]+ )?(\d\d:\d\d:\d\d\.\d+)", done.stdout, re.MULTILINE)
    assert times == sorted(times)
    assert len(service.baton("logs", "--lines", "3").stdout.splitlines()) == 3


@pytest.mark.slow
async def test_a_control_actor_that_died_is_missed_by_nobody_and_the_next_one_starts_nothing_twice(
    service: RayService,
) -> None:
    pids = dict(service.pids)
    (control,) = own_processes("ray::Control")
    control.kill()
    await service.ask("nobody in control")
    done = service.up("--set", "transfer.transport=shm")
    assert done.returncode == 2
    assert "error: transfer.transport: " in done.stderr
    assert "was started with another one" in done.stderr
    done = service.up()
    assert done.returncode == 0, done.stderr
    assert service.pids == pids
    await service.ask("taken over")


@pytest.mark.slow
async def test_a_node_that_dies_takes_its_workers_and_no_request_along_and_the_planner_replaces_them(
    service: RayService,
) -> None:
    address = next(service.node_of(name) for name in ("decode-1", "decode-2") if service.node_of(name) in service.nodes)
    (lost,) = [name for name, addresses in service.addresses.items() if addresses.get("rpc", "").startswith(address)]
    asking = asyncio.gather(*(service.ask(f"request {number}") for number in range(8)))
    follower = service.follow_logs()
    died_s = time.monotonic()
    service.cluster.remove_node(service.nodes.pop(address), allow_graceful=False)
    await service.until(lambda workers: lost not in workers)
    gone_s = time.monotonic() - died_s
    await asking
    await service.ask("one node less")
    assert gone_s < GONE_S
    service.cluster.add_node(num_cpus=1, node_ip_address="127.0.0.5")
    await service.until(lambda workers: sorted(workers.values()) == ["decode", "decode", "prefill"])
    await service.ask("as many as before")
    await asyncio.to_thread(follower.until, f"process={await service.newest()}")
    said = await asyncio.to_thread(follower.end)
    assert "logs of a node cannot be read any more" in said


@pytest.mark.slow
async def test_a_nats_and_a_router_that_die_are_there_again_for_the_same_workers(service: RayService) -> None:
    workers = {process.pid for process in own_processes("_worker --config")}
    for command in ("nats-server", "router --config"):
        (process,) = own_processes(command)
        process.kill()
        async with asyncio.timeout(WAIT_S):
            while own_processes(command) in ([], [process]):
                await asyncio.sleep(0.05)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await service.until(lambda workers: sorted(workers.values()) == ["decode", "decode", "prefill"])
                    break
        await service.ask(f"after {command}")
    assert {process.pid for process in own_processes("_worker --config")} == workers


@pytest.mark.slow
async def test_a_rollout_goes_node_by_node_costs_no_request_and_outlives_the_control_actor(service: RayService) -> None:
    """No node has room for a second worker."""
    wanted = ("--set", "engine.max_running=32")
    workers = {process.pid for process in own_processes("_worker --config")}
    run = run_at(service.grpc)
    assert run is not None
    command = [*BATON, "rollout", "--json", *wanted, "--nats-url", run.file.nats]
    rolling = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    asking = asyncio.create_task(asks_until(service, ended := asyncio.Event()))
    assert rolling.stdout is not None
    with rolling.stdout as lines:
        while '"starts"' not in await asyncio.to_thread(lines.readline):
            pass
    rolling.kill()
    rolling.wait()
    async with asyncio.timeout(WAIT_S):
        while {process.pid for process in own_processes("_worker --config")} <= workers:
            await asyncio.sleep(0.05)
    (control,) = own_processes("ray::Control")
    control.kill()
    done = service.up(*wanted)
    assert done.returncode == 0, done.stderr
    async with asyncio.timeout(3 * WAIT_S):
        while workers & {process.pid for process in own_processes("_worker --config")}:
            await asyncio.sleep(0.1)
    await service.until(lambda workers: sorted(workers.values()) == ["decode", "decode", "prefill"])
    ended.set()
    assert await asking > 0


async def asks_until(service: RayService, ended: asyncio.Event) -> int:
    """How many requests were answered; none may fail."""
    answered = 0
    while not ended.is_set():
        await service.ask(f"request {answered} of a steady load")
        answered += 1
    return answered


@pytest.mark.slow
def test_what_ray_tells_of_its_nodes_does_not_get_into_results(service: RayService) -> None:
    program = f"""
import ray, time
from baton.service.on_ray.cluster import connected
with connected({service.cluster.address!r}, "default"):
    print("result", flush=True)
    worker = ray._private.worker.global_worker
    for _ in range(120):  # its thread may not listen yet, and what comes before is lost
        ray._private.utils.push_error_to_driver(worker, "test", "a node died", worker.current_job_id)
        time.sleep(0.5)
"""
    command = [sys.executable, "-u", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stderr is not None
        assert driver.stdout.readline() == "result\n"
        assert any("a node died" in line for line in driver.stderr)
        driver.kill()
        assert not driver.communicate()[0]


def test_down_drains_and_leaves_nothing(service: RayService) -> None:
    pids = processes_of_the_service()
    assert len(pids) == 6  # one of them is the router's helper for grammars
    done = service.baton("down")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["draining", "all processes have ended"]), done
    assert_gone(pids)
    with pytest.raises(grpc.aio.AioRpcError):
        asyncio.run(service.ask("anybody there"))


@pytest.mark.slow
def test_a_process_ends_with_its_actor_and_the_others_are_ended_without_a_control_actor_too(
    service: RayService,
) -> None:
    done = service.up("--no-planner")
    assert done.returncode == 0, done.stderr
    (control,) = own_processes("ray::Control")
    control.kill()
    pids = processes_of_the_service()
    workers = service.pids["workers-1"]  # without a planner those of the mock engine share a process
    psutil.Process(workers).parent().kill()
    assert_gone([workers])
    done = service.baton("down")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["draining", "all processes have ended"]), done
    assert_gone(pids)
    assert service.baton("down").returncode == 3


@pytest.mark.slow
def test_down_ends_the_service_that_is_named_whatever_its_namespace(service: RayService) -> None:
    done = service.up("--no-planner", "--namespace", "night")
    assert done.returncode == 0, done.stderr
    pids = processes_of_the_service()
    done = service.baton("down", "--service", "night")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["draining", "all processes have ended"]), done
    assert_gone(pids)


def processes_of_the_service() -> list[int]:
    """Their pids: NATS, the router and the workers."""
    return [process.pid for process in [*own_processes("runtime.processes.launch"), *own_processes("nats-server")]]
