"""What a worker refuses to be put together from."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from baton_proto.discovery import TransferEndpoint
from baton_proto.sampling import SamplingParams
from baton_proto.transfer import MAJOR
from baton_proto.worker import Grant
from kvtransfer.wire.identity import check_hello, hello
from runtime.code_version import code_version
from runtime.config.serving import parse_config
from runtime.errors import ConfigError, HandshakeError
from tests.tiny_families import write_family
from tests.tiny_model import write_tiny_model
from worker.engines.base import EngineAssembly
from worker.engines.own import build_engine, refusal


def of_form(assembly: EngineAssembly, form: str) -> EngineAssembly:
    assert assembly.kv is not None
    return dataclasses.replace(assembly, kv=dataclasses.replace(assembly.kv, form=form))


def test_a_mock_of_several_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: the mock model"):
        build_engine(parse_config({"model": "mock", "engine": {"tensor_parallel": 4}}))


def test_workers_with_different_forms_of_kv_refuse_each_other_at_the_handshake() -> None:
    assembly = build_engine(parse_config({"model": "mock"}))
    assembly.close()
    old, new = (of_form(assembly, f"vllm {version} CPU_ATTN AVX512") for version in ("0.31", "0.32"))
    ours = new.identity("decode", 1)
    grant = Grant("t", "decode", 1, 1, [1], 0, 60.0, TransferEndpoint("host", "", ""))
    check_hello(hello(new.identity("prefill", 1), grant, "tcp"), ours, grant.generation)
    with pytest.raises(HandshakeError, match="model_hash differs"):
        check_hello(hello(old.identity("prefill", 1), grant, "tcp"), ours, grant.generation)


def test_routers_know_an_engine_that_takes_no_kv_by_a_form_of_its_own() -> None:
    ours = build_engine(parse_config({"model": "mock"}))
    ours.close()
    alone = dataclasses.replace(ours, kv=None)
    assert alone.model_hash == ours.model_hash
    other_code = f"{ours.layout.dtype} by 0.0.1, transfer {MAJOR}"
    assert ours.announced_form == other_code.replace("0.0.1", code_version())
    forms = {ours.announced_form, alone.announced_form, of_form(ours, "vllm 0.31").announced_form, other_code}
    assert len(forms) == 4


def test_the_model_hash_tells_weights_and_configurations_apart_and_nothing_else(tmp_path: Path) -> None:
    def model_hash(name: str, **different: Any) -> str:
        folder = write_tiny_model(tmp_path / name, **different)
        config = parse_config({"model": str(folder), "engine": {"device": "cpu", "kv_memory": "2MiB", "threads": 1}})
        assembly = build_engine(config)
        assembly.close()
        return assembly.identity("worker", 1).model_hash

    first, same = model_hash("a"), model_hash("b")
    assert first == same
    assert len({first, model_hash("c", seed=1), model_hash("d", rope_theta=5e5)}) == 3


def test_layers_with_a_window_give_back_kv_and_a_peer_does_not_see_which_tiers_there_are(tmp_path: Path) -> None:
    model = str(write_family(tmp_path / "model", "gemma3"))
    disk = {"folder": str(tmp_path / "disk"), "size": "4MiB"}
    forms = set()
    for tiers in ({}, {"host_kv_memory": "1MiB"}, {"host_kv_memory": "1MiB", "disk_kv": disk}):
        engine = {"device": "cpu", "kv_memory": "2MiB", "threads": 1}
        assembly = build_engine(parse_config({"model": model, "engine": engine | tiers}))
        assembly.close()
        assert 0 < assembly.layout.num_window_blocks < assembly.layout.num_blocks
        forms.add(assembly.announced_form)
    assert len(forms) == 1


def test_what_vllm_alone_has_is_refused_by_name() -> None:
    assert refusal(SamplingParams(max_tokens=1, vllm_xargs={"a": 1})).startswith("vllm_xargs: ")
    loops = SamplingParams(max_tokens=1, repetition_detection={"max_pattern_size": 3, "min_count": 2})
    assert refusal(loops).startswith("repetition_detection: ")
    assert not refusal(SamplingParams(max_tokens=1))
