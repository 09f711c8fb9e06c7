"""cluster.yaml: what Ray says to it, and what its cluster launcher does with it on nodes of our own."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil
import pytest
import yaml

from baton_proto.generated import inference_pb2 as pb
from runtime.calls.router import Client
from runtime.processes.ports import free_port
from runtime.security.secret import Secret
from tests.ssh_nodes import ADDRESSES, LOOPBACK, SshNodes, ssh_nodes

ROOT = Path(__file__).parents[1]
FILE = ROOT / "cluster.yaml"
UP_S, DOWN_S, GONE_S, ANSWER_S = 240.0, 120.0, 20.0, 60.0
PROMPT = "The capital of France is"
ON_LOOPBACK_ONLY = "export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0\n"


def loaded() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return config


def variations() -> dict[str, dict[str, Any]]:
    """The file as it is, and with the sections that each part of its comments offers in the place of its own."""
    found = {"one machine": loaded()}
    for title, comment in re.findall(r"^# ---- (.*) ----\n((?:#(?! ----).*\n)*)", FILE.read_text(), re.MULTILINE):
        sections = [line.removeprefix("#   ") for line in comment.splitlines() if line.startswith("#   ")]
        found[title] = loaded() | yaml.safe_load("\n".join(sections))
    return found


def test_the_file_tells_of_several_nodes_and_of_a_cloud_provider() -> None:
    assert list(variations()) == ["one machine", "Several nodes", "A cloud provider"]


@pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in variations().items()])
def test_ray_accepts_the_file(config: dict[str, Any]) -> None:
    ray = importlib.util.find_spec("ray")  # not imported: it would take its settings from this process for good
    assert ray is not None
    assert ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)


def test_what_the_file_names_is_there() -> None:
    config = loaded()
    commands = "\n".join(config["setup_commands"] + config["head_start_ray_commands"])
    target, extras = re.findall(r"make -C ~/baton (\w+) EXTRAS=(\S+)", commands)[0]
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    assert extras in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert all((ROOT / name).exists() for name in config["rsync_filter"] + re.findall(r"--config (\S+)", commands))


@pytest.fixture(scope="module")
def nodes() -> Iterator[SshNodes]:
    """With a copy of the sources: `ray up` fails when a file goes while it reads the folder."""
    with ssh_nodes() as nodes:
        ignored = (ROOT / ".gitignore").read_text().replace("/", "").split()
        shutil.copytree(ROOT, nodes.folder / "code", ignore=shutil.ignore_patterns(".git", *ignored), symlinks=True)
        (nodes.folder / "code" / "build").mkdir()
        yield nodes


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(480)
async def test_one_machine_serves_to_itself_alone_after_ray_up_and_nothing_is_left_after_ray_down(
    nodes: SshNodes,
) -> None:
    serving = {"router": {"http_port": 0, "grpc_port": 0}, "engine": {"kv_memory": "64MiB", "threads": 1}}
    write_files(nodes, serving)
    grpc, http = addresses(launcher(nodes, "up", UP_S))

    async with Client(grpc) as client:
        sampling = pb.SamplingOptions(temperature=0, max_tokens=4)
        answer = await client.generate(pb.GenerateRequest(text=PROMPT, sampling=sampling), ANSWER_S)
    async with httpx.AsyncClient(timeout=ANSWER_S) as over_http:
        question = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        completion = (await over_http.post(f"{http}/completions", json=question)).raise_for_status().json()
    assert "Paris" in answer.text
    assert completion["choices"][0]["text"] == answer.text
    assert not (nodes.home / "baton" / "build").exists()
    assert grpc in nodes.listening()
    assert {host(address) for address in nodes.listening()} == {LOOPBACK}

    assert "all processes have ended" in launcher(nodes, "down", DOWN_S)
    assert_nothing_is_left(nodes)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(480)
def test_a_ray_up_that_fails_says_why_and_leaves_nothing(nodes: SshNodes) -> None:
    write_files(nodes, {"model": "/nowhere"})
    assert "error: model: '/nowhere' is neither" in launcher(nodes, "up", UP_S, exit_code=1)
    assert_nothing_is_left(nodes)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(480)
async def test_workers_go_to_all_nodes_and_end_with_them(nodes: SshNodes) -> None:
    serving = {
        "model": "mock",
        "router": {"http_port": 0, "grpc_port": 0},
        "workers": {"prefill": 3, "decode": 3, "per_process": 1},
        "engine": {"threads": 1},
    }
    write_files(nodes, serving, ADDRESSES)
    printed = launcher(nodes, "up", UP_S)
    assert "waiting for nodes: 1 of 3 are there" in printed
    grpc, _ = addresses(printed)

    operator_key = Secret((nodes.home / ".local" / "state" / "baton" / "default" / "operator.key").read_text())
    async with Client(grpc, operator_key=operator_key) as client:
        answer = await client.generate(pb.GenerateRequest(text=PROMPT * 10), ANSWER_S)
        workers = (await client.status(ANSWER_S)).workers
    assert answer.token_ids
    assert Counter(host(worker.address) for worker in workers) == dict.fromkeys(ADDRESSES, 2)

    assert "all processes have ended" in launcher(nodes, "down", DOWN_S)
    assert_nothing_is_left(nodes)


def write_files(nodes: SshNodes, serving: dict[str, Any], ips: list[str] | None = None) -> None:
    """serving.yaml, and cluster.yaml with the user and the ports of a test. With `ips`: as its comments say for several
    nodes, each of which has room for two workers."""
    config = loaded()
    config["cluster_name"] = nodes.folder.name
    config["auth"] = {"ssh_user": getuser(), "ssh_private_key": str(nodes.user_key)}
    changes = {
        "6379": str(free_port(LOOPBACK)),
        "--head ": f"--head --dashboard-port={free_port(LOOPBACK)} --ray-client-server-port={free_port(LOOPBACK)} ",
    }
    if ips:
        config["provider"] |= {"head_ip": ips[0], "worker_ips": ips[1:]}
        changes |= {
            ON_LOOPBACK_ONLY: "",
            "--nodes 1": f"--nodes {len(ips)}",
            "--disable-usage": "--num-cpus=2 --disable-usage",
            # On one machine, two that start at once may give their sockets the same name.
            "--address=": "--temp-dir=$RAY_TMPDIR/$NODE_IP --address=",
        }
    for section, commands in config.items():
        if section.endswith("_commands"):
            config[section] = [changed(command, changes) for command in commands]
    (nodes.folder / "code" / "cluster.yaml").write_text(yaml.safe_dump(config))
    (nodes.folder / "code" / "serving.yaml").write_text(yaml.safe_dump(serving))


def changed(command: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        command = command.replace(old, new)
    return command


def launcher(nodes: SshNodes, verb: str, timeout_s: float, exit_code: int = 0) -> str:
    """What `ray up` or `ray down` prints. What it notes of a cluster must not meet what the head notes."""
    environment = os.environ | {"RAY_TMPDIR": str(nodes.folder / "launcher"), "TMPDIR": str(nodes.folder)}
    done = subprocess.run(
        [f"{sys.prefix}/bin/ray", verb, "-y", "cluster.yaml"],
        cwd=nodes.folder / "code",
        env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout
    return done.stdout


def addresses(printed: str) -> tuple[str, str]:
    """Of gRPC and of the OpenAI API, as `baton up` tells them to whoever runs `ray up`."""
    found = re.search(r"gRPC on (\S+), OpenAI API on (\S+),", printed)
    assert found is not None, printed
    return found[1], found[2]


def host(address: str) -> str:
    return address.rpartition(":")[0]


def assert_nothing_is_left(nodes: SshNodes) -> None:
    _, left = psutil.wait_procs(nodes.processes(), timeout=GONE_S)
    assert not [process.cmdline() for process in left]
