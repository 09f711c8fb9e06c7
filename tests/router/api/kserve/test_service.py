"""The Open Inference Protocol, with Triton's own client where it is installed, and with messages made by hand."""

import asyncio
import importlib.util
import json
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from baton_proto.generated import (
    open_inference_pb2 as pb,
    open_inference_pb2_grpc as pb_grpc,
)
from router.api.serving.grpc_api import GrpcApi
from router.requests.body_budget import BodyBudget
from runtime.security.bearer_keys import BearerKeys
from runtime.security.secret import Secret
from tests.router.api.conversations import grpc_serving
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import MODEL, ScriptedGenerator, make_frontend, tiny_tokenizer

TEXT = "It is 42, she said: ça va, 😀!"
SESSION = Path(__file__).parent / "triton_session.py"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None, reason="tritonclient of the extra `dev` is not installed"
)


@pytest.fixture
def generator(tiny_model: Path) -> ScriptedGenerator:
    return ScriptedGenerator(tiny_tokenizer(tiny_model), [TEXT, "Another one."])


@pytest.fixture
async def api(generator: ScriptedGenerator) -> AsyncIterator[GrpcApi]:
    async with grpc_serving(make_frontend(generator)) as api:
        yield api


@pytest.fixture
async def stub(api: GrpcApi) -> AsyncIterator[pb_grpc.GRPCInferenceServiceStub]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
        yield pb_grpc.GRPCInferenceServiceStub(channel)


def request(text: str = "What is", **fields: Any) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=MODEL, **fields)
    tensor = made.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    tensor.contents.bytes_contents.append(text.encode())
    return made


def texts(response: pb.ModelInferResponse, name: str = "text_output") -> list[str]:
    place = [output.name for output in response.outputs].index(name)
    raw, found = response.raw_output_contents[place], []
    while raw:
        (length,) = struct.unpack("<I", raw[:4])
        found.append(raw[4 : 4 + length].decode())
        raw = raw[4 + length :]
    assert response.outputs[place].shape == [len(found)]
    return found


@needs_triton
async def test_tritons_own_client_gets_text(api: GrpcApi, generator: ScriptedGenerator) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SESSION), f"127.0.0.1:{api.port}", stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    seen = json.loads(printed)
    prompt, answer = generator.tokenizer.encode("What is").tolist(), generator.answers[0]
    whole = {"text_output": [TEXT], "finish_reason": ["stop"], "output_ids": answer, "output_lengths": [len(answer)]}
    assert seen["ready"] == [True, True, True]
    assert seen["strange_ready"] == [False, False]
    assert seen["server"] == "baton"
    assert {"text_input": "BYTES", "input_ids": "INT64", "stream": "BOOL"}.items() <= seen["inputs"].items()
    assert seen["outputs"] == list(whole)
    assert seen["whole"] == {"id": "r1", "final": None, **whole}
    assert seen["ids"] == {"id": "", "final": None, "text_output": [TEXT]}
    assert (seen["two"]["text_output"], len(seen["two"]["output_lengths"])) == ([TEXT, "Another one."], 2)
    assert seen["asynchronous"] == {"id": "aio", "final": None, **whole}
    first, second = generator.requests[:2]
    assert (first.prompt.tolist(), second.prompt.tolist()) == (prompt, [5, 6, 7])
    (sampling,) = first.sampling
    assert (sampling.temperature, sampling.top_k, sampling.logit_bias, first.stop) == (0.5, 7, {5: 1.5}, ("zz",))
    (sampling,) = second.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.7, 90, 3)
    check_streams([item for item in seen["streamed"] if isinstance(item, dict)], whole)
    assert [item for item in seen["streamed"] if isinstance(item, str)] == [
        "text_input: is empty; at least one token is needed"
    ]
    check_refusals(seen["refused"])


def check_streams(seen: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    by_id = {name: [item for item in seen if item["id"] == name] for name in "abc"}
    assert by_id["a"].pop() == {"id": "a", "final": True}
    for name in "ab":
        assert len(by_id[name]) > 3
        assert "".join(item["text_output"][0] for item in by_id[name]) == whole["text_output"][0]
        assert [one for item in by_id[name] for one in item["output_ids"]] == whole["output_ids"]
        assert [item["finish_reason"] for item in by_id[name]][-2:] == [[""], ["stop"]]
    assert [item["final"] for item in by_id["b"]] == [False] * (len(by_id["b"]) - 1) + [True]
    assert not any(item["final"] for item in by_id["a"])
    assert by_id["c"] == [{"id": "c", "final": True, **whole}]


def check_refusals(refused: dict[str, list[str]]) -> None:
    expected = {
        "model": ("NOT_FOUND", "'other'"),
        "name": ("INVALID_ARGUMENT", "temperatur: is not known here; the nearest known input is 'temperature'"),
        "value": ("INVALID_ARGUMENT", "temperature: is 9.0, must be at least 0.0 and at most 2.0"),
        "type": ("INVALID_ARGUMENT", "max_tokens: Expected `int`, got `str`"),
        "no prompt": ("INVALID_ARGUMENT", "text_input: is missing; it or input_ids is needed"),
        "stream": ("INVALID_ARGUMENT", "stream: is true, and ModelInfer answers once; ModelStreamInfer streams"),
        "output": ("INVALID_ARGUMENT", "outputs: 'x' is none of text_output, finish_reason, output_ids"),
    }
    for name, (code, problem) in expected.items():
        assert refused[name][0] == f"StatusCode.{code}"
        assert problem in refused[name][1]


async def test_values_may_stand_in_the_tensors_themselves(
    stub: pb_grpc.GRPCInferenceServiceStub, generator: ScriptedGenerator
) -> None:
    made = request()
    made.inputs.add(name="top_p", datatype="FP64", shape=[]).contents.fp64_contents.append(0.5)
    made.inputs.add(name="stop", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"x", b"yy"])
    made.inputs.add(name="stop_token_ids", datatype="INT32", shape=[2]).contents.int_contents.extend([3, 4])
    response = await stub.ModelInfer(made, timeout=60)
    assert texts(response) == [TEXT]
    assert texts(response, "finish_reason") == ["stop"]
    (asked,) = generator.requests
    (sampling,) = asked.sampling
    assert (sampling.top_p, sampling.stop_token_ids, asked.stop) == (0.5, (3, 4), ("x", "yy"))


async def test_numbers_may_be_written_as_texts_as_tritons_clients_do(
    stub: pb_grpc.GRPCInferenceServiceStub, generator: ScriptedGenerator
) -> None:
    told = {"sampling_parameters": '{"temperature": "0.25", "max_tokens": "7", "ignore_eos": "true"}', "top_k": "3"}
    await stub.ModelInfer(
        request(parameters={name: pb.InferParameter(string_param=text) for name, text in told.items()}), timeout=60
    )
    (sampling,) = generator.requests[0].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.ignore_eos, sampling.top_k) == (0.25, 7, True, 3)


def tensor(made: pb.ModelInferRequest, **fields: Any) -> pb.ModelInferRequest:
    made.inputs.add(**fields)
    return made


def raw_text(*data: bytes) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=MODEL, raw_input_contents=data)
    return tensor(made, name="text_input", datatype="BYTES", shape=[1]) if data else made


IDS = {"name": "input_ids", "datatype": "INT64"}
ONE_ID = pb.InferTensorContents(int64_contents=[5])
TWO_KINDS = pb.InferTensorContents(int_contents=[5], int64_contents=[5])


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (tensor(request(), name="text_input", datatype="BYTES", shape=[1]), "text_input: is given twice"),
        (tensor(request(), name="x", datatype="BF8", shape=[1]), "x: has datatype 'BF8', not one of BOOL, INT8"),
        (tensor(request(), name="x", datatype="INT8", shape=[-1]), "x: must have a shape of at most 8 sizes"),
        (tensor(request(), name="x", datatype="INT8", shape=[2**62] * 9), "x: must have a shape of at most 8 sizes"),
        (tensor(request(), **IDS, shape=[2**62] * 8), "values; at most 4096 are allowed"),
        (tensor(request(), **IDS, shape=[3]), "input_ids: has 0 values, and its shape 3"),
        (request(raw_input_contents=[b"", b""]), "raw_input_contents: has 2 entries for 1 inputs"),
        (raw_text(b"\x05\0\0\0abcd"), "text_input: must have a 32-bit length before each text"),
        (raw_text(b"\x01\0\0\0\xff"), "text_input: is not UTF-8"),
        (request(raw_input_contents=[b"\x01\0\0\0a"]), "text_input: has values in two places"),
        (tensor(raw_text(), **IDS, shape=[1], contents=TWO_KINDS), "input_ids: has values in two places"),
        (tensor(request(), **IDS, shape=[1], contents=ONE_ID), "text_input: contradicts input_ids: leave one of them"),
        (pb.ModelInferRequest(model_name=MODEL), "text_input: is missing; it or input_ids is needed"),
        (request(parameters={"stop": pb.InferParameter(int64_param=3)}), "stop: Expected `array`, got `int`"),
        (request(parameters={"stop": pb.InferParameter()}), "stop: Expected `array`, got `null`"),
        (
            tensor(request(), name="stop", datatype="INT64", shape=[1], contents=ONE_ID),
            "stop: Expected `str`, got `int`",
        ),
        (request(id="a b"), " id: must be 1 to 128 visible ASCII characters"),
        (request(parameters={"priority": pb.InferParameter(int64_param=3)}), "priority: cannot be 3 here"),
        (request(parameters={"sampling_parameters": pb.InferParameter(string_param="[")}), "is not a JSON object"),
        (request(model_version="7"), "model_version: is '7'; there is 1 alone"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(
    stub: pb_grpc.GRPCInferenceServiceStub, bad: pb.ModelInferRequest, problem: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(bad, timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in f" {caught.value.details()}"


async def test_a_fault_of_ours_names_the_request_also_where_the_caller_did_not(
    stub: pb_grpc.GRPCInferenceServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.kserve.service.read_wish", lambda *_: 1 // 0)
    with pytest.raises(grpc.aio.AioRpcError, match=r"internal error; request [0-9a-f]{24}"):
        await stub.ModelInfer(request(), timeout=60)


async def test_a_caller_that_leaves_ends_its_requests(
    stub: pb_grpc.GRPCInferenceServiceStub, generator: ScriptedGenerator
) -> None:
    generator.stuck_at = 2
    for begin in (stub.ModelInfer, lambda one: stub.ModelStreamInfer(iter([one]))):
        call = begin(request())
        generator.requests.clear()
        generator.cancelled.clear()
        async with asyncio.timeout(60):
            while not generator.requests:
                await asyncio.sleep(0.01)
            call.cancel()
            await generator.cancelled.wait()


async def test_a_key_is_asked_for_but_by_those_who_look_whether_the_server_lives(generator: ScriptedGenerator) -> None:
    api = GrpcApi(make_frontend(generator), make_questions(), BearerKeys.plain([Secret("k" * 32)]))
    await api.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            assert (await stub.ServerLive(pb.ServerLiveRequest(), timeout=60)).live
            assert (await stub.ServerReady(pb.ServerReadyRequest(), timeout=60)).ready
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ModelInfer(request(), timeout=60)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            shown = (("authorization", f"Bearer {'k' * 32}"),)
            assert texts(await stub.ModelInfer(request(), timeout=60, metadata=shown)) == [TEXT]
    finally:
        await api.stop()


async def test_an_idle_stream_gives_its_place_to_others(generator: ScriptedGenerator) -> None:
    """There is memory for one message at once, and who waits for the next one of a stream holds it."""
    frontend = replace(make_frontend(generator), bodies=BodyBudget(1))
    api = GrpcApi(frontend, make_questions())
    await api.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            stream = stub.ModelStreamInfer()
            await stream.write(request(id="first"))
            answer = await stream.read()
            assert isinstance(answer, pb.ModelStreamInferResponse)
            assert texts(answer.infer_response) == [TEXT]
            assert texts(await stub.ModelInfer(request(), timeout=60)) == [TEXT]
            with pytest.raises(grpc.aio.AioRpcError, match="the messages of other requests fill the 1 bytes"):
                await stream.read()
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await api.stop()
