import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from baton_proto.generated import inference_pb2

PROTO = Path(__file__).parents[2] / "proto"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """proto/generate.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("generate_stubs", PROTO / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_stubs_are_what_the_proto_files_give(generator: ModuleType) -> None:
    committed = {path.name: path.read_text() for path in generator.TARGET.glob("*_pb2*") if path.is_file()}
    assert generator.generate() == committed


def test_every_proto_file_is_generated(generator: ModuleType) -> None:
    assert sorted(generator.PROTO_FILES) == sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))


def test_messages_say_where_they_live() -> None:
    assert inference_pb2.GenerateRequest.__module__ == "baton_proto.generated.inference_pb2"
