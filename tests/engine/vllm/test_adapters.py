"""The adapters of a vLLM whose core says what the test wants."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.vllm.adapters import VllmAdapters
from runtime.errors import ModelError, UnavailableError


class Core:
    def __init__(self) -> None:
        self.loaded: list[Any] = []

    async def add_lora_async(self, wanted: Any) -> bool:
        if wanted.lora_path == "/nowhere":
            raise ValueError("no adapter_config.json")
        self.loaded.append(wanted)
        return True


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    module = ModuleType("vllm.lora.request")
    module.LoRARequest = SimpleNamespace  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", module)
    return Core()


def adapters(core: Core, lora_config: object = SimpleNamespace(max_loras=4)) -> VllmAdapters:
    return VllmAdapters(SimpleNamespace(engine_core=core, vllm_config=SimpleNamespace(lora_config=lora_config)))


async def test_a_folder_that_is_loaded_again_shares_no_prefix_with_what_it_had_before(core: Core) -> None:
    """vLLM finds prefixes by name and path of an adapter."""
    of = adapters(core)
    for _ in range(2):
        await of.load("sql", "/adapters/sql")
        assert of.request("sql") is core.loaded[-1]
        await of.unload("sql")
    assert [one.lora_path for one in core.loaded] == ["/adapters/sql", "/adapters/sql/."]
    assert len({one.lora_int_id for one in core.loaded}) == 2
    assert of.names == []
    with pytest.raises(KeyError):
        of.request("sql")


async def test_a_request_may_name_what_vllm_has_loaded_alone(core: Core) -> None:
    of = adapters(core)
    assert of.request("") is None
    with pytest.raises(ModelError, match=r"cannot load /nowhere: no adapter_config\.json"):
        await of.load("sql", "/nowhere")
    assert (of.names, of.places) == ([], 4)
    await of.load("sql", "/adapters/sql")
    with pytest.raises(UnavailableError, match="has an adapter 'sql' already"):
        await of.load("sql", "/adapters/other")
    with pytest.raises(UnavailableError, match="no adapter 'poem'"):
        await of.unload("poem")
    for config in (None, SimpleNamespace()):  # the other one: a vLLM without the name
        with pytest.raises(UnavailableError, match="enable_lora: true"):
            await adapters(core, lora_config=config).load("sql", "/adapters/sql")
