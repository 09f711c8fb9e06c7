"""Names of vLLM: none is used without being listed, and one that is missing is told with what is off for it."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import pytest
from structlog.testing import capture_logs

from engine.vllm.private_names import NAMES, SEEDS, SHARING, Name, check_names, missing
from runtime.errors import ConfigError
from tests.test_packaging import ROOT

HERE = "engine.vllm.private_names"
GOOD = Name(f"{HERE}:Name.use", "a field")
USERS = [*sorted((ROOT / "engine" / "vllm").rglob("*.py")), ROOT / "worker" / "engines" / "vllm.py"]


def imported(file: Path) -> set[str]:
    """What the file has from vLLM."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    theirs = [node for node in nodes if (node.module or "").split(".")[0] == "vllm"]
    return {f"{node.module}:{alias.name}" for node in theirs for alias in node.names}


def test_every_name_that_is_imported_from_vllm_is_listed() -> None:
    listed = {name.path.partition(":")[0] + ":" + name.path.partition(":")[2].split(".")[0] for name in NAMES}
    used = set().union(*map(imported, USERS))
    assert len(used) > 10
    assert used <= listed


def test_every_method_that_vllm_calls_in_our_connector_is_listed() -> None:
    """One that a version renames is never called, and nothing says so."""
    tree = ast.parse((ROOT / "engine" / "vllm" / "kv" / "connector.py").read_text())
    (connector,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "BatonConnector")
    methods = {node.name for node in connector.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    listed = {name.path.rpartition(".")[2] for name in NAMES if "KVConnectorBase_V1." in name.path}
    listed.remove("_vllm_config")  # which we read
    assert len(methods) > 10
    assert methods == listed


class Row(TypedDict):
    key: int


@dataclass
class Late:
    def __post_init__(self) -> None:
        self.known_later = 1


def test_what_is_missing_is_found_in_modules_classes_fields_and_arguments() -> None:
    there = [GOOD, Name("datetime:date.today", "a method"), Name(f"{HERE}:SHARING", "a name")]
    there += [Name("decimal:Context.prec", ""), Name("threading:Thread._target", "a field that __init__ sets")]
    there += [Name(f"{HERE}:check_names.needed", "an argument"), Name(f"{__name__}:Row.key", "of a TypedDict")]
    there += [Name(f"{__name__}:Late.known_later", "a field that __post_init__ sets")]
    gone = [Name("no_such:x", ""), Name(f"{HERE}:no_such", ""), Name(f"{HERE}:Name.no_such", "")]
    gone += [Name(f"{HERE}:check_names.lacking", "a local variable"), Name(f"{__name__}:Row.no_such", "")]
    assert list(missing([*there, *gone])) == gone


def test_without_a_needed_name_nothing_starts_and_without_another_a_feature_is_off() -> None:
    sharing, seeds = Name("no_such:a", "our connector", SHARING), Name("no_such:b", "a draw", SEEDS)
    with capture_logs() as logs:
        off = check_names("9.9", [], [GOOD, sharing, seeds])
    assert [(entry["feature"], entry["names"]) for entry in logs] == [(SHARING, ["no_such:a"]), (SEEDS, ["no_such:b"])]
    assert off == ["worker_extension_cls"], "it would not load"
    with pytest.raises(ConfigError, match=r"vLLM 9\.9 lacks what Baton's workers use: no_such:a \(our connector\)"):
        check_names("9.9", [SHARING], [sharing, seeds])
    with pytest.raises(ConfigError, match="no_such:c"):
        check_names("9.9", [], [Name("no_such:c", "a request")])
