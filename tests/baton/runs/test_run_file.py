"""What a run leaves for the commands of its user, and which run a command finds."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from baton.runs.run_file import FORM, OwnRun, RunFile, choose_run, find_keys, find_operator_key, run_at, runs
from runtime.errors import ConfigError
from runtime.security.cluster_key import OPERATOR, new_cluster_key
from runtime.security.keys import Keys

URL = "nats://127.0.0.1:4222"
OTHER = "c" * 32
CLUSTER = new_cluster_key()
KEYS = Keys(CLUSTER, operator=(CLUSTER.derive(OPERATOR),))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "baton"


def started(namespace: str = "default", **fields: str) -> OwnRun:
    run = OwnRun(namespace, KEYS, on_ray=False, log_dir=None)
    run.update(**fields)
    return run


def test_commands_of_the_same_user_find_the_keys_of_a_service_that_runs(state: Path) -> None:
    run = started(nats=URL, grpc="127.0.0.1:8001")
    (folder,) = state.iterdir()
    assert {path.stat().st_mode & 0o777 for path in (state, folder)} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    for url in (URL, "nats://localhost:4222", "nats://127.0.0.1"):
        found = find_keys(url, "default", {})
        assert found.nats.options()["password"] == CLUSTER.derive("nats").reveal()
        assert found.operator[0].reveal() == KEYS.operator[0].reveal()
    assert find_keys(URL, "staging", {}).cluster is None
    assert find_keys("nats://127.0.0.1:4223", "default", {}).cluster is None
    given = find_keys(URL, "default", {"BATON_CLUSTER_KEY": OTHER}).cluster
    assert given is not None
    assert given.secret.reveal() == OTHER
    assert run_at("localhost:8001") is not None
    assert run_at("127.0.0.1:8002") is None
    run.close()
    assert not list(state.iterdir())
    assert find_keys(URL, "default", {}).cluster is None


def test_no_key_stands_in_the_file_of_addresses(state: Path) -> None:
    run = started()
    text = (state / "default" / FORM).read_text()
    for key in (CLUSTER.secret, KEYS.operator[0]):
        assert key.reveal() not in text
    run.close()


def test_the_only_service_is_meant_and_several_are_named(state: Path) -> None:
    assert choose_run(None) is None
    first = started(grpc="127.0.0.1:1")
    found = choose_run(None)
    assert found is not None
    assert found.name == "default"
    second, third = started(grpc="127.0.0.1:2"), started("staging")
    with pytest.raises(ConfigError, match=r"--service: several .* default \(pid \d+, 127.0.0.1:1\), default-2 .*stag"):
        choose_run(None)
    for name in ("default-2", "staging"):
        found = choose_run(name)
        assert found is not None
        assert found.name == name
    with pytest.raises(ConfigError, match=r"no service 'production' of yours runs .*default-2"):
        choose_run("production")
    for run in (first, second, third):
        run.close()


def test_a_variable_goes_before_the_key_of_the_run(state: Path) -> None:
    run = started(grpc="127.0.0.1:8001")
    found = find_operator_key(run_at("127.0.0.1:8001"), {"BATON_OPERATOR_KEY": OTHER})
    assert found is not None
    assert found.reveal() == OTHER
    run.close()


def test_a_folder_that_others_can_reach_is_not_used(state: Path) -> None:
    state.mkdir(mode=0o777, parents=True)
    state.chmod(0o777)
    run = started(nats=URL)
    assert not list(state.iterdir())
    assert runs() == []
    run.close()


def test_a_service_with_a_runtime_folder_is_found_from_a_shell_without_one(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    without = started()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    within = started("other")
    assert [path.name for path in (runtime / "baton").iterdir()] == ["other"]
    assert {run.name for run in runs()} == {"default", "other"}
    without.close()
    within.close()


@pytest.mark.parametrize(
    "change", [{"host": "elsewhere"}, {"started_s": 1.0}, {"pid": 2**22 + 1}], ids=["host", "start", "pid"]
)
def test_a_file_of_another_machine_or_another_process_is_ignored(state: Path, change: dict[str, object]) -> None:
    run = started()
    path = state / "default" / FORM
    file = msgspec.json.decode(path.read_bytes(), type=RunFile)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(file, **change)))
    assert runs() == []
    assert path.exists(), "its owner lives"
    run.close()


def test_the_files_of_a_killed_service_are_removed(state: Path) -> None:
    command = """
import os, signal
from baton.runs.run_file import OwnRun
from runtime.security.keys import NO_KEYS
OwnRun("default", NO_KEYS, False, None)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", command], env=os.environ, check=False).returncode == -9
    assert (state / "default" / FORM).exists()
    assert runs() == []
    assert not list(state.iterdir())
