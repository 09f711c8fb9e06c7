"""The house keeps its shape: rooms with a caption each, and tests where the code is."""

import ast
from pathlib import Path

import pytest

from tests.test_packaging import PACKAGES, ROOT

# Folders of tests that mirror no package.
OF_NO_PACKAGE = {"benchmarks", "chaos", "data", "deploy", "fuzz", "mutate", "proto", "recipes", "spine", "vllm"}
ROOMS = [path.parent for package in PACKAGES.values() for path in sorted(package.rglob("__init__.py"))]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_has_a_caption(room: Path) -> None:
    if room.name != "generated":
        caption = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
        assert caption, f"{room} has no caption in its __init__.py"


def test_tests_lie_where_their_package_lies() -> None:
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path()}
    elsewhere = {folder for folder in folders if not (ROOT / folder).is_dir() and folder.parts[0] not in OF_NO_PACKAGE}
    assert not elsewhere
