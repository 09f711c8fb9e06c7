"""What the environment of a vLLM worker must have beside vLLM: few packages, and each of them is stated."""

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from runtime.processes.other_python import PACKAGES, package_links
from tests.test_packaging import ROOT

LOADED = """
import importlib.metadata, json, sys
import decode_worker.__main__, prefill_worker.__main__, worker.engines.vllm
tops = {name.partition(".")[0] for name in sys.modules}
of = importlib.metadata.packages_distributions()
names = sorted({distribution for top in tops for distribution in of.get(top, [])})
print(json.dumps([sorted(tops), names]))
"""
ALWAYS = {"setuptools", "pip", "baton-serve", "grpcio-reflection"}  # grpc imports the last one where it is


def loaded(paths: list[str]) -> tuple[set[str], set[str]]:
    """Top-level modules and distributions after the imports of such a worker."""
    command = [sys.executable, "-P", "-c", LOADED]
    environ = {"PYTHONPATH": ":".join(paths), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    modules, distributions = json.loads(done.stdout)
    return set(modules), {normal(name) for name in distributions}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def stated() -> set[str]:
    """The packages of the list, and what they require, extras included."""
    lines = (ROOT / "deploy" / "vllm-requirements.txt").read_text().splitlines()
    waiting = [line for line in lines if line and not line.startswith("#")]
    found: set[str] = set()
    while waiting:
        name = normal(re.match(r"[\w.-]+", waiting.pop()).group())  # type: ignore[union-attr]
        if name not in found:
            found.add(name)
            try:
                waiting += requires(name) or []
            except PackageNotFoundError:
                continue
    return found


def test_a_worker_with_vllm_imports_a_thin_part_of_baton_with_stated_needs() -> None:
    modules, distributions = loaded([str(ROOT), str(ROOT / "proto")])
    ours = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"baton_proto"}
    assert modules & ours <= set(PACKAGES)
    assert not modules & {"torch", "transformers", "numba", "vllm"}
    assert distributions - ALWAYS <= stated()


def test_such_a_worker_sees_our_packages_and_nothing_that_lies_beside_them(tmp_path: Path) -> None:
    links = package_links(tmp_path)
    assert sorted(path.name for path in links.iterdir()) == sorted(PACKAGES)
    assert package_links(tmp_path) == links
    modules, _ = loaded([str(links)])
    assert set(PACKAGES) <= modules
