"""Who serves has loaded all that a request of any kind needs: a module that is first imported with a request keeps all
others waiting, and fails where files can no longer be opened."""

import asyncio
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest

from baton.service.local.child_process import ChildProcess
from baton_proto.generated import inference_pb2 as pb, open_inference_pb2 as kserve, open_inference_pb2_grpc
from tests.service import Service, running_service
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

TELLS_IMPORTS = """
import os, sys

class Tell:
    def find_spec(name, path=None, target=None):
        os.write(2, f"\\nprocess {os.getpid()} looks for the module {name}\\n".encode())

sys.meta_path.insert(0, Tell)
"""
SCHEMA = {"type": "object", "properties": {"hours": {"type": "integer"}}, "required": ["hours"]}
TOOL = {"name": "rain", "description": "Will it rain?", "parameters": SCHEMA}
SAID = [{"role": "user", "content": "Rain?"}]
FEW = {"max_tokens": 4}
FORMAT = {"type": "json_schema", "json_schema": {"name": "day", "schema": SCHEMA}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", FEW | {"prompt": "The capital of France is", "logprobs": 2, "echo": True, "n": 2}),
    ("/v1/completions", FEW | {"prompt": [[5, 6, 7], [8, 9]], "temperature": 0, "stop": ["x"]}),
    ("/v1/chat/completions", FEW | {"messages": SAID, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", FEW | {"messages": SAID, "response_format": FORMAT}),
    ("/v1/chat/completions", FEW | {"messages": SAID, "tools": [{"type": "function", "function": TOOL}]}),
    ("/v1/chat/completions", FEW | {"messages": SAID, "structured_outputs": {"regex": "[ab]+"}}),
    ("/v1/messages", FEW | {"messages": SAID}),
    ("/v1/messages", FEW | {"messages": SAID, "tools": [{"name": "rain", "input_schema": SCHEMA}]}),
    ("/v1/messages/count_tokens", {"messages": SAID}),
    ("/v1/responses", {"input": "Rain?", "max_output_tokens": 4}),
    ("/v1/responses", {"input": "Rain?", "max_output_tokens": 4, "tools": [{"type": "function", **TOOL}]}),
    ("/v1/responses/input_tokens", {"input": "Rain?"}),
    ("/tokenize", {"prompt": "Rain?"}),
    ("/detokenize", {"tokens": [5, 6]}),
]
REFUSED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": -1}),
    ("/v1/messages", {"messages": [], "max_tokens": 1}),
    ("/v1/responses", {"input": 5}),
    ("/v1/completions", "no object"),
    ("/v2/nothing", {}),
]
FEW_FILES = 16  # the router may open beside those that it has
PAGES = ("/health", "/ready", "/metrics", "/metrics/targets", "/v1/models", "/openapi.json", "/docs")


@pytest.mark.parametrize("is_mock", [False, True])
async def test_a_request_of_any_kind_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mock: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text(TELLS_IMPORTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("baton.service.local.build_process.ChildProcess", ChildProcess)  # not forked
    model = "mock" if is_mock else write_tiny_model(tmp_path / "model")
    async with running_service(model, 1, 1) as service:
        processes = list(service.supervisor.children)
        before = {process: len(service.log(process)) for process in processes}
        await _ask_all(service)
        for process in processes:
            whole, told = service.log(process), f"^process {service.pid(process)} looks for the module (.*)$"
            assert "uvloop" in re.findall(told, whole, re.MULTILINE), "imports are told"
            late = re.findall(told, whole[before[process] :], re.MULTILINE)
            assert not late, f"{process} imports with a request: {', '.join(late)}"


async def test_a_router_without_descriptors_refuses_and_never_fails(tmp_path: Path) -> None:
    async with running_service(write_tiny_model(tmp_path / "model"), 0, 1) as service:
        router = psutil.Process(service.pid("router-1"))
        open_files = router.num_fds()
        router.rlimit(psutil.RLIMIT_NOFILE, (open_files + FEW_FILES, open_files + FEW_FILES))
        seen: Counter[int] = Counter()

        async def ask(path: str, body: dict[str, Any]) -> None:
            async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
                answer = await http.post(path, json={"model": "model"} | body)
                seen[answer.status_code] += 1
                assert answer.status_code == 200 or "retry-after" in answer.headers, answer.text

        await asyncio.gather(*(ask(*asked) for asked in ASKED * 4))
    assert seen[200]
    assert seen.keys() <= {200, 503}, seen


async def _ask_all(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.http_url, timeout=60) as http:
        named = {"model": (await http.get("/v1/models")).json()["data"][0]["id"]}
        for path, body in ASKED:
            answer = await http.post(path, json=named | body)
            assert answer.status_code == 200, (path, body, answer.text)
            if "max" in "".join(body):
                answer = await http.post(path, json=named | body | {"stream": True})
                assert answer.status_code == 200, (path, body, answer.text)
        for path, wrong in REFUSED:
            assert (await http.post(path, json=wrong)).status_code in (400, 404, 405, 422)
        for path in PAGES:
            assert (await http.get(path)).status_code in (200, 404), path
    client = service.client
    for grammar in (None, pb.Grammar(regex="[ab]+")):
        sampling = pb.SamplingOptions(max_tokens=4, grammar=grammar)
        await client.generate(pb.GenerateRequest(text="Rain?", sampling=sampling), timeout_s=60)
    await client.status()
    await client.tree(pb.TreeRequest())
    await client.diff(pb.DiffRequest())
    await client.explain(pb.ExplainRequest(text="Rain?"))
    await client.sleep("decode-1")
    await client.wake("decode-1")
    async with grpc.aio.insecure_channel(service.grpc_address) as channel:
        stub = open_inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        made = kserve.ModelInferRequest(model_name=named["model"])
        tensor = made.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
        tensor.contents.bytes_contents.append(b"Rain?")
        await stub.ModelInfer(made, timeout=60)
