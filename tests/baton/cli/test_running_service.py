"""Commands find the service that this user runs, and the operator's key; strangers and users find neither."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton import Client
from baton.cli.app import app
from baton.cli.terminal.exit_codes import ExitCode
from runtime.errors import UnauthorizedError
from runtime.processes.owned_folder import PREFIX
from tests.service import assert_gone
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

BATON = [sys.executable, "-m", "baton"]
API_KEY = "a-user-s-key-of-32-characters-ok"
SERVING = """
model: mock
router: {http_port: 0, grpc_port: 0}
planner: {interval_s: 0.5, limits: {max_prefill: 2, max_decode: 3}}
"""


@dataclass
class Up:
    """A running `baton up`, in a home of its own."""

    process: "subprocess.Popen[str]"
    home: Path
    lines: list[dict[str, Any]]

    @property
    def told(self) -> dict[str, Any]:
        """What it said when it served."""
        return next(line for line in self.lines if line["event"] == "serving")

    @property
    def pids(self) -> list[int]:
        return [line["pid"] for line in self.lines if line["event"] == "ready"]

    @property
    def folder(self) -> Path:
        return self.home / "state" / "baton" / "default"

    def run(self, *arguments: str, **variables: str) -> Any:
        return run(self.home, *arguments, **variables)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short TMPDIR of services, because sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="b") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def run(home: Path, *arguments: str, **variables: str) -> Any:
    return CliRunner(env={"XDG_STATE_HOME": str(home / "state"), **variables}).invoke(app, list(arguments))


@contextmanager
def baton_up(home: Path, *arguments: str, last: str = "serving", **variables: str) -> Iterator[Up]:
    (home / "serving.yaml").write_text(SERVING)
    command = [*BATON, "up", "--json", "--config", str(home / "serving.yaml"), *arguments]
    with (home / "up.log").open("w") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, "XDG_STATE_HOME": str(home / "state"), **variables},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # without a terminal that a SIGHUP would speak of
        )
    up = Up(process, home, [])
    assert process.stdout is not None
    try:
        for line in process.stdout:
            up.lines.append(json.loads(line))
            if up.lines[-1]["event"] == last:
                break
        else:
            raise AssertionError((home / "up.log").read_text())
        yield up
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert_gone(up.pids)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    home = tmp_path_factory.mktemp("home")
    with baton_up(home, "--planner", "--log-dir", str(home / "logs"), last="planner", BATON_API_KEY=API_KEY) as up:
        yield up


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["status"], "decode-1"),
        (["plan", "--json"], "holds"),
        (["events", "lag"], "decode-1"),
        (["events", "tree"], "router-1"),
        (["events", "diff"], "decode-1"),
        (["events", "explain", "--prompt", "a"], "decode-1"),
        (["logs", "decode-1"], "ready"),
        (["logs"], "process=router-1"),
        (["logs"], "process=decode-1"),
        (["scale", "decode=1"], "set by hand: decode 1"),
        (["scale", "--release"], "the planner decides alone"),
        (["status", "--service", "default"], "decode-1"),
        (["plan", "--json", "--service", "default"], "holds"),
        (["logs", "decode-1", "--service", "default"], "ready"),
    ],
)
def test_commands_find_the_service_and_its_operator_key_by_themselves(
    service: Up, command: list[str], words: str
) -> None:
    done = service.run(*command)
    assert (done.exit_code, done.stderr) == (0, "")
    assert words in done.stdout


def test_users_find_the_router_and_show_their_own_key(service: Up) -> None:
    for question in (["chat", "hi"], ["generate", "--prompt", "hi"]):
        assert "the API key is missing" in service.run(*question, "--max-tokens", "2").stderr
        assert service.run(*question, "--max-tokens", "2", BATON_API_KEY=API_KEY).exit_code == 0


def test_a_program_finds_the_service_and_its_keys_as_commands_do(service: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(service.home / "state"))
    with Client() as client:
        assert {worker.state for worker in client.status().workers} == {"ready"}
        with pytest.raises(UnauthorizedError, match=r"the API key is missing .*BATON_API_KEY, in Python as api_key"):
            client.generate("hi", max_tokens=2)
    monkeypatch.setenv("BATON_API_KEY", API_KEY)
    with Client("default") as client:
        assert len(client.generate("hi", max_tokens=2, ignore_eos=True).token_ids) == 2
    with Client(api_key="another") as client, pytest.raises(UnauthorizedError, match="this is not the API key"):
        client.models()


@pytest.mark.parametrize("variables", [{}, {"BATON_API_KEY": API_KEY}], ids=["a stranger", "a user"])
def test_who_has_no_operator_key_is_told_where_it_is(service: Up, tmp_path: Path, variables: dict[str, str]) -> None:
    address, nats = service.told["grpc"], service.told["nats"]
    for command in (["sleep", "decode-1"], ["wake", "decode-1"], ["status"], ["events", "tree"]):
        done = run(tmp_path, *command, "--address", address, **variables)
        assert (done.exit_code, done.stdout) == (ExitCode.USAGE, "")
        assert "operator key" in done.stderr
        assert "--operator-key-file" in done.stderr
    cluster = {"BATON_CLUSTER_KEY": (service.folder / "cluster.key").read_text()}
    for order in (["scale", "decode=2"], ["scale", "--release"], ["drain", "decode-1"], ["flip", "prefill-1"]):
        done = run(tmp_path, *order, "--nats-url", nats, **variables, **cluster)
        assert (done.exit_code, done.stdout) == (ExitCode.USAGE, "")
        assert "planner: the operator key is missing; " in done.stderr
        assert "--operator-key-file" in done.stderr
        done = run(tmp_path, *order, "--nats-url", nats, **cluster, BATON_OPERATOR_KEY="a wrong one".replace(" ", "-"))
        assert "planner: this is not the operator key" in done.stderr
    assert "set by hand" not in service.run("plan").stdout


def test_an_operator_elsewhere_brings_the_key_in_a_file(service: Up, tmp_path: Path) -> None:
    key = ["--operator-key-file", str(service.folder / "operator.key")]
    assert run(tmp_path, "status", "--address", service.told["grpc"], *key).exit_code == 0
    cluster = {"BATON_CLUSTER_KEY": (service.folder / "cluster.key").read_text()}
    done = run(tmp_path, "scale", "--release", "--nats-url", service.told["nats"], *key, **cluster)
    assert (done.exit_code, done.stdout) == (0, "the planner decides alone\n")


def test_a_service_of_another_name_is_refused_with_the_names_that_are(service: Up) -> None:
    for command in (["status"], ["plan"], ["down"], ["logs", "decode-1"], ["chat", "hi"]):
        done = service.run(*command, "--service", "production")
        assert done.exit_code == ExitCode.USAGE
        assert "no service 'production' of yours runs on this machine; those that do: default (pid " in done.stderr


@pytest.mark.parametrize(
    "command", [["status"], ["chat", "hi"], ["generate", "-p", "a"], ["plan"], ["events", "lag"], ["scale", "decode=2"]]
)
def test_where_nothing_runs_commands_say_how_to_start_or_to_name_it(tmp_path: Path, command: list[str]) -> None:
    done = run(tmp_path, *command)
    assert (done.exit_code, done.stdout) == (ExitCode.UNAVAILABLE, "")
    for words in (" answer", "`baton up` starts a service here", "names one elsewhere"):
        assert words in done.stderr


def test_two_services_are_told_apart_and_down_ends_the_one_that_is_named(tmp_path: Path, temporary: Path) -> None:
    with baton_up(tmp_path) as first, baton_up(tmp_path) as second:
        for command in (["status"], ["plan"], ["down"]):
            done = first.run(*command)
            assert done.exit_code == ExitCode.USAGE
            assert "several services of yours run on this machine; name one of: default (pid " in done.stderr
            assert f"default-2 (pid {second.process.pid}, {second.told['grpc']})" in done.stderr
        done = first.run("down", "--service", "default-2")
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.endswith("all processes have ended\n")
        assert second.process.wait(60) == ExitCode.OK
        assert first.run("status").exit_code == 0
        assert json.loads(first.run("down", "--json").stdout.splitlines()[-1]) == {"event": "stopped", "clean": True}
        assert first.process.wait(60) == ExitCode.OK
    assert not list(temporary.iterdir())
    assert not list((tmp_path / "state" / "baton").iterdir())


def test_a_service_that_was_told_no_folder_keeps_logs_shows_them_and_leaves_none(
    tmp_path: Path, temporary: Path
) -> None:
    with baton_up(tmp_path) as up:
        for process, words in (("router-1", "process=router-1"), ("workers-1", "ready"), ("nats", "Server is ready")):
            done = up.run("logs", process)
            assert (done.exit_code, done.stderr) == (0, "")
            assert words in done.stdout
        done = up.run("logs", "decode-7")
        assert done.exit_code == ExitCode.UNAVAILABLE
        assert "no log of 'decode-7'; those that are there: nats, router-1, workers-1" in done.stderr
        follower = subprocess.Popen(
            [*BATON, "logs", "--follow"],
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert follower.stdout is not None
        follower.stdout.readline()
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(60) == ExitCode.OK
        with follower.stdout:
            assert "process=router-1" in follower.stdout.read()
        assert follower.wait(30) == 0  # it ends with the service
    shown = (tmp_path / "up.log").read_text()
    assert shown.count("process=router-1") > 0
    assert "Server is ready" not in shown
    assert not list(temporary.iterdir())


def test_on_sighup_logs_that_were_moved_away_are_opened_anew_and_their_level_is_read_again(tmp_path: Path) -> None:
    logs, moved = tmp_path / "logs", tmp_path / "moved"
    with baton_up(tmp_path, "--log-dir", str(logs)) as up:
        moved.mkdir()
        for path in logs.glob("*.log"):
            path.rename(moved / path.name)
        (tmp_path / "serving.yaml").write_text(f"{SERVING}\nlogging: {{level: warning}}\nvllm: {{seed: 9}}\n")
        up.process.send_signal(signal.SIGHUP)
        assert up.process.stdout is not None
        assert [json.loads(up.process.stdout.readline())["event"] for _ in range(2)] == ["later", "logs"]
        (tmp_path / "serving.yaml").write_text(f"{SERVING}\nlogging: {{level: debug}}\n")
        up.process.send_signal(signal.SIGHUP)
        assert json.loads(up.process.stdout.readline())["event"] == "logs"
        assert up.run("generate", "--prompt", "hi", "--max-tokens", "2").exit_code == 0
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(60) == ExitCode.OK
    for name, words in (("router-1", "draining"), ("workers-1", "draining"), ("nats", "Exiting")):
        assert words in (logs / f"{name}.log").read_text()
        assert words not in (moved / f"{name}.log").read_text()
    assert "[debug" in (logs / "router-1.log").read_text()
    assert "[debug" not in (moved / "router-1.log").read_text()


def test_the_next_service_removes_what_a_killed_one_left_and_nothing_of_a_living_one(
    tmp_path: Path, temporary: Path
) -> None:
    def left() -> set[str]:
        return {path.name for path in temporary.iterdir()}

    with baton_up(tmp_path) as living:
        of_living = left()
        with baton_up(tmp_path) as killed:
            of_killed = left() - of_living
            killed.process.send_signal(signal.SIGKILL)
            killed.process.wait()
            assert_gone(killed.pids)
        assert len(of_killed) == 1
        assert of_living | of_killed == left()
        assert all(name.startswith(PREFIX) for name in left())
        with baton_up(tmp_path):
            assert left() > of_living
            assert not left() & of_killed
            assert {path.name for path in living.folder.parent.iterdir()} == {"default", "default-2"}
        assert living.run("status", "--service", "default").exit_code == 0


def test_a_service_is_refused_where_its_names_live_and_served_in_another_namespace(tmp_path: Path) -> None:
    for home in ("first", "second"):
        (tmp_path / home).mkdir()
    with baton_up(tmp_path / "first") as first:
        there = ["--set", f"nats.url={first.told['nats']}"]
        key = {"BATON_CLUSTER_KEY": (first.folder / "cluster.key").read_text()}
        code, news, said = up_that_fails(tmp_path / "second", *there, **key)
        assert (code, news) == (ExitCode.USAGE, "")
        assert (
            "error: namespace: decode-1, prefill-1, router-1 of another service live in 'default' at nats://127.0.0.1:"
            in said
        )
        assert "or give this one --namespace ANOTHER" in said
        assert first.run("generate", "--prompt", "hi", "--max-tokens", "2").exit_code == 0
        for _ in range(2):  # the first of them is killed, and leaves its records
            with baton_up(tmp_path / "second", *there, "--namespace", "other", **key) as second:
                done = second.run("generate", "--prompt", "hi", "--max-tokens", "2", "--service", "other")
                assert (done.exit_code, done.stderr) == (0, "")


def up_that_fails(home: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    (home / "serving.yaml").write_text(SERVING)
    command = [*BATON, "up", "--json", "--config", str(home / "serving.yaml"), *arguments]
    environment = {**os.environ, "XDG_STATE_HOME": str(home / "state"), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["http", "grpc"])
def test_a_port_in_use_is_named_with_its_key_before_anything_starts(tmp_path: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        port = address.rpartition(":")[2]
        code, news, said = up_that_fails(tmp_path, "--set", f"router.{name}_port={port}")
    assert (code, news) == (ExitCode.USAGE, "")
    assert f"error: router.{name}_port: cannot listen on {address}: Address already in use; choose another" in said


def test_a_nats_that_does_not_answer_is_told_at_once_and_given_up_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "serving.yaml").write_text("")
    code, news, said = up_that_fails(tmp_path, "--set", "nats.url=nats://127.0.0.1:1")
    assert (code, news) == (ExitCode.UNAVAILABLE, "")
    waiting, end = said.index("waiting for NATS"), said.index("error: nats.url: NATS at nats://127.0.0.1:1 did not ")
    assert waiting < end
    assert "timeout_s=10.0" in said[waiting:end]
    assert "start it, or leave nats.url out for a server of our own" in said[end:]


def test_counts_beyond_the_limits_are_refused_at_once(service: Up) -> None:
    for order, words in (
        ("decode=9", "decode: 9 workers cannot be: planner.limits allow 1 to 3 (decode), see serving.yaml"),
        ("prefill=0", "prefill: 0 workers cannot be: planner.limits allow 1 to 2 (prefill), see serving.yaml"),
    ):
        done = service.run("scale", order)
        assert (done.exit_code, done.stdout, done.stderr) == (ExitCode.USAGE, "", f"error: {words}\n")
    assert json.loads(service.run("plan", "--json").stdout)["holds"] == {"prefill": None, "decode": None}


def test_who_puts_a_worker_to_sleep_hears_that_the_planner_wakes_it(service: Up) -> None:
    while json.loads(service.run("plan", "--json").stdout)["target"] is None:
        pass
    done = service.run("sleep", "prefill-1")
    assert done.exit_code == 0
    assert done.stderr == "warning: the planner wants 1 prefill workers and wakes prefill-1 again\n"


def test_of_several_models_commands_ask_for_one(tmp_path: Path) -> None:
    folders = [str(write_tiny_model(tmp_path / name, seed=seed)) for seed, name in enumerate(("one", "two"))]
    small = ["--prefill", "0", "--set", "engine.kv_memory=16MiB"]
    with baton_up(tmp_path, "--model", folders[0], "--model", folders[1], *small) as up:
        listed = json.loads(up.run("models", "--json").stdout)
        assert [(row["id"], row["state"], [worker["worker_id"] for worker in row["workers"]]) for row in listed] == [
            ("one", "ready", ["decode-one-1"]),
            ("two", "ready", ["decode-two-1"]),
        ]
        for question in (["status"], ["events", "tree"], ["events", "lag"], ["events", "explain", "--prompt", "a"]):
            answer = up.run(*question, "--model", "two")
            assert answer.exit_code == 0
            assert "decode-one-1" not in answer.stdout
        new = ["update-weights", "--model", folders[0], "--all"]
        assert up.run(*new, "--served-model", "two").exit_code == 0
        for command in (["events", "tree"], ["events", "lag"], new, ["generate", "--prompt", "a"]):
            refused = up.run(*command)
            assert refused.exit_code == ExitCode.USAGE
            assert "one, two" in refused.output
