import asyncio
import contextlib
import errno
import logging
import math
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import grpc.aio
import pytest
import structlog
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from router.api.serving.grpc_api import GrpcApi, InferenceService
from router.requests.frontend import Frontend
from runtime.blocks.block_hash import SEED
from runtime.calls.router import Client
from runtime.config.serving import RouterConfig
from runtime.errors import DeadlineError, OverloadedError, UnavailableError, WorkerLostError
from runtime.security.grpc_bearer import MAX_PENDING, MAX_STREAMS, metadata as key_metadata
from runtime.security.secret import Secret
from tests.fuzz.doors.http2_frames import PREFACE, SETTINGS, frame
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import MODEL, ScriptedGenerator, make_frontend, tiny_tokenizer
from tests.tiny_model import VOCAB_SIZE

MAX_CONCURRENT_STREAMS = 3  # a setting of HTTP/2
OPERATOR = Secret("o" * 32)
TEXT = "It is 42, she said: ça va, 😀!"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def status() -> pb.StatusResponse:
    return pb.StatusResponse(router_id="router-0", queue=pb.QueueStatus(capacity=8))


@pytest.fixture
def generator(tiny_model: Path) -> ScriptedGenerator:
    return ScriptedGenerator(tiny_tokenizer(tiny_model), [TEXT, "Another one."])


@pytest.fixture
async def api(generator: ScriptedGenerator) -> AsyncIterator[GrpcApi]:
    api = GrpcApi(make_frontend(generator), make_questions(status), operators=[OPERATOR])
    await api.start("127.0.0.1", 0)
    yield api
    await api.stop()


@pytest.fixture
async def channel(api: GrpcApi) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> pb_grpc.InferenceStub:
    return pb_grpc.InferenceStub(channel)


async def generate(stub: pb_grpc.InferenceStub, **fields: Any) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(pb.GenerateRequest(**fields), timeout=60)]


async def refusal(stub: pb_grpc.InferenceStub, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(stub, **fields)
    return caught.value


async def test_started_then_pieces_then_finished(stub: pb_grpc.InferenceStub, generator: ScriptedGenerator) -> None:
    responses = await generate(stub, text="What is", request_id="r1")
    assert {response.request_id for response in responses} == {"r1"}
    started, *pieces, finished = responses
    prompt = generator.tokenizer.encode("What is")
    assert (started.started.model, started.started.prompt_tokens) == (MODEL, len(prompt))
    assert "".join(response.piece.text for response in pieces) == TEXT
    assert [token_id for response in pieces for token_id in response.piece.token_ids] == generator.answers[0]
    assert [response.piece.finish_reason for response in pieces[-2:]] == [0, pb.FINISH_REASON_STOP]
    assert finished.finished.usage.completion_tokens == len(generator.answers[0])
    (served_by,) = finished.finished.served_by
    assert (served_by.decode_worker, served_by.prefill_worker, served_by.kv_bytes) == ("decode-0", "prefill-0", 4096)


async def test_text_chat_and_tokens_are_three_ways_to_ask(
    stub: pb_grpc.InferenceStub, generator: ScriptedGenerator
) -> None:
    messages = [pb.ChatMessage(role="user", content="Hi")]
    await generate(stub, text="Hi")
    await generate(stub, chat=pb.ChatMessages(messages=messages))
    await generate(stub, tokens=pb.TokenIds(ids=[7, 8, 9]))
    text, chat, tokens = (request.prompt.tolist() for request in generator.requests)
    assert text == generator.tokenizer.encode("Hi").tolist()
    assert chat == generator.tokenizer.chat([{"role": "user", "content": "Hi"}]).tolist()
    assert tokens == [7, 8, 9]


async def test_options_arrive_as_they_are_written_and_zero_is_a_value(
    stub: pb_grpc.InferenceStub, generator: ScriptedGenerator
) -> None:
    sampling = pb.SamplingOptions(temperature=0.7, logit_bias={5: -0.3}, seed=2**63 - 1, stop=["x"], n=2)
    await generate(stub, text="Hi", sampling=sampling, priority=-3, model=MODEL)
    await generate(stub, text="Hi", sampling=pb.SamplingOptions(temperature=0.0, seed=0, logprobs=0))
    await generate(stub, text="Hi")
    written, zero, absent = (request.sampling[0] for request in generator.requests)
    assert (written.temperature, written.logit_bias) == (0.7, {5: -0.3})
    assert [choice.seed for choice in generator.requests[0].sampling] == [2**63 - 1, 0]
    assert (generator.requests[0].stop, generator.requests[0].priority) == (("x",), -3)
    assert (zero.temperature, zero.seed, zero.logprobs) == (0.0, 0, 0)
    assert (absent.temperature, absent.logprobs) == (1.0, None)


async def test_logprobs_come_with_their_tokens(stub: pb_grpc.InferenceStub) -> None:
    responses = await generate(stub, text="Hi", sampling=pb.SamplingOptions(logprobs=2))
    (logprob,) = responses[1].piece.logprobs
    assert (logprob.text, logprob.logprob) == ("I", -0.5)
    assert [top.logprob for top in logprob.top] == [-0.5, -1.5]
    assert logprob.top[0].text == "I"


async def test_choices_have_their_index(stub: pb_grpc.InferenceStub) -> None:
    texts = ["", ""]
    for response in await generate(stub, text="Hi", sampling=pb.SamplingOptions(n=2)):
        texts[response.piece.index] += response.piece.text
    assert texts == [TEXT, "Another one."]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({}, "INVALID_ARGUMENT", "input: is missing; one of text, chat and tokens is needed"),
        ({"text": ""}, "INVALID_ARGUMENT", "text: is empty"),
        ({"tokens": pb.TokenIds()}, "INVALID_ARGUMENT", "tokens.ids: is empty"),
        ({"chat": pb.ChatMessages()}, "INVALID_ARGUMENT", "chat.messages: is empty"),
        (
            {"chat": pb.ChatMessages(messages=[pb.ChatMessage(role="robot", content="x")])},
            "INVALID_ARGUMENT",
            "chat.messages[0].role: is 'robot', must be one of system, developer, user, assistant",
        ),
        ({"tokens": pb.TokenIds(ids=[VOCAB_SIZE])}, "INVALID_ARGUMENT", "token id 512 is not in the vocabulary"),
        ({"tokens": pb.TokenIds(ids=[5] * 5000)}, "INVALID_ARGUMENT", "tokens.ids: has 5000 tokens"),
        ({"text": "a", "model": "gpt-5"}, "NOT_FOUND", "'gpt-5' is not served here"),
        ({"text": "a", "request_id": "a b"}, "INVALID_ARGUMENT", "request_id: must be"),
        (
            {"text": "a", "sampling": pb.SamplingOptions(temperature=math.nan)},
            "INVALID_ARGUMENT",
            "temperature: is nan",
        ),
        ({"text": "a", "sampling": pb.SamplingOptions(n=17)}, "INVALID_ARGUMENT", "n: is 17"),
    ],
)
async def test_bad_input_names_field_and_limit(
    stub: pb_grpc.InferenceStub, generator: ScriptedGenerator, fields: dict[str, Any], code: str, words: str
) -> None:
    error = await refusal(stub, **fields)
    assert error.code().name == code
    assert words in (error.details() or "")
    assert generator.requests == []


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("Inference/Generate", b"\xff\xff\xff"),
        ("Inference/Generate", b"\x12\x02\xff\xfe"),  # text that is not UTF-8
        ("Inference/ListModels", b"\xff\xff\xff"),
        ("Admin/Status", b"\xff\xff\xff"),  # with the key
    ],
)
async def test_bytes_that_are_no_request_are_refused(channel: grpc.aio.Channel, method: str, data: bytes) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/baton.v1.{method}")(data, metadata=key_metadata(OPERATOR))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith("request: Error parsing message")


async def test_a_client_that_does_not_read_loses_its_answer_after_the_deadline(
    generator: ScriptedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.grpc.inference.STALL_GRACE_S", 0.0)
    generator.answers = [[5] * 100_000]
    api = GrpcApi(replace(make_frontend(generator), config=RouterConfig(request_timeout_s=0.5)), make_questions(status))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{await api.start('127.0.0.1', 0)}") as channel:
        sampling = pb.SamplingOptions(max_tokens=4000, n=16, logprobs=20)
        call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="Hi", sampling=sampling))
        await call.read()
        await asyncio.wait_for(generator.cancelled.wait(), 30)
    await api.stop()


async def test_calls_at_once_on_one_connection_are_bounded(api: GrpcApi) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
    settings = await asyncio.wait_for(reader.read(100), 60)
    writer.close()
    assert struct.pack(">HI", MAX_CONCURRENT_STREAMS, MAX_STREAMS) in settings


@pytest.mark.slow
async def test_thousands_of_calls_at_once_are_all_answered(api: GrpcApi) -> None:
    """More than the server takes from gRPC meanwhile: gRPC itself would end many of them with CANCELLED."""
    async with contextlib.AsyncExitStack() as stack:
        calls = []
        for _ in range(MAX_PENDING // MAX_STREAMS // 2):
            own_connection = grpc.aio.insecure_channel(f"127.0.0.1:{api.port}", [("grpc.use_local_subchannel_pool", 1)])
            stub = pb_grpc.InferenceStub(await stack.enter_async_context(own_connection))
            calls += [stub.ListModels(pb.ListModelsRequest(), timeout=60) for _ in range(MAX_STREAMS)]
        assert {await call.code() for call in calls} == {grpc.StatusCode.OK}


async def test_our_client_has_more_calls_at_once_than_one_connection_takes(
    api: GrpcApi, generator: ScriptedGenerator
) -> None:
    generator.stuck_at = 0
    async with Client(f"127.0.0.1:{api.port}") as client, contextlib.AsyncExitStack() as stack:
        for _ in range(MAX_STREAMS + 1):
            stream = await stack.enter_async_context(contextlib.aclosing(client.stream(pb.GenerateRequest(text="Hi"))))
            assert (await asyncio.wait_for(anext(stream), 20)).HasField("started")


async def test_messages_of_10_mb_are_refused(stub: pb_grpc.InferenceStub) -> None:
    assert (await refusal(stub, text="a" * 10_000_000)).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await generate(stub, text="a")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OverloadedError("queue", 8, 1.25), "RESOURCE_EXHAUSTED", "holds its limit of 8 requests"),
        (UnavailableError("the router is draining"), "UNAVAILABLE", "the router is draining"),
        (WorkerLostError("decode-0", "died"), "UNAVAILABLE", "worker decode-0: died"),
        (DeadlineError("the request", 2.0), "DEADLINE_EXCEEDED", "did not finish within 2.0 s"),
        (OSError(errno.EMFILE, "secret"), "UNAVAILABLE", "no more open files (ulimit -n)"),
        (ZeroDivisionError("secret"), "INTERNAL", "internal error; request r9"),
    ],
)
@pytest.mark.parametrize("error_at", [0, 2])
async def test_failures_have_their_status_and_no_stack_trace(
    stub: pb_grpc.InferenceStub,
    generator: ScriptedGenerator,
    error: Exception,
    error_at: int,
    code: str,
    words: str,
) -> None:
    generator.error, generator.error_at = error, error_at
    failure = await refusal(stub, text="a", request_id="r9")
    assert failure.code().name == code
    assert words in (failure.details() or "")
    assert "secret" not in (failure.details() or "")
    trailing = dict(failure.trailing_metadata())
    assert trailing.get("retry-after-ms") == ("1250" if code == "RESOURCE_EXHAUSTED" else None)


@pytest.mark.parametrize("by", ["cancel", "close"])
async def test_a_cancelled_call_and_a_closed_channel_cancel_their_request(
    api: GrpcApi, generator: ScriptedGenerator, by: str
) -> None:
    generator.stuck_at = 0
    async with asyncio.timeout(30):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel:
            call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a"))
            await call.read()
            if by == "cancel":
                call.cancel()
                await generator.cancelled.wait()
        await generator.cancelled.wait()


async def test_the_callers_deadline_is_the_requests(stub: pb_grpc.InferenceStub, generator: ScriptedGenerator) -> None:
    for timeout_s, earlier_s in ((50, 0.25), (None, 0.0)):
        begun_s = time.monotonic()
        [_ async for _ in stub.Generate(pb.GenerateRequest(text="a"), timeout=timeout_s)]
        latest_s = generator.requests[-1].deadline_s - (timeout_s or 60) + earlier_s
        assert begun_s - 0.1 < latest_s < time.monotonic() + 0.11  # gRPC rounds such times up to tenths of a second
    generator.stuck_at = 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in stub.Generate(pb.GenerateRequest(text="a"), timeout=0.3)]
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(30):
        await generator.cancelled.wait()


@pytest.mark.parametrize("where", ["in a write", "in the status"])
async def test_a_caller_who_has_left_by_the_time_of_its_answer_is_no_error(
    api: GrpcApi,
    stub: pb_grpc.InferenceStub,
    generator: ScriptedGenerator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """What gRPC raises then depends on fractions of a millisecond, so the test raises it."""
    left = cygrpc.ExecuteBatchError("execute_batch", ())
    if where == "in a write":
        generator.error, generator.error_at = left, 1
    else:
        monkeypatch.setattr(InferenceService, "_generate", AsyncMock(side_effect=left))
    with structlog.testing.capture_logs() as ours:
        with contextlib.suppress(grpc.aio.AioRpcError):
            [_ async for _ in stub.Generate(pb.GenerateRequest(text="a"), timeout=1)]
        await api.stop(grace_s=5)
    assert [entry for entry in ours if entry["log_level"] == "error"] == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_request_ids_travel_as_metadata_too(stub: pb_grpc.InferenceStub, generator: ScriptedGenerator) -> None:
    call: Any = stub.Generate(pb.GenerateRequest(text="a"), metadata=(("x-request-id", "m1"),))
    assert {response.request_id async for response in call} == {"m1"}
    assert dict(await call.initial_metadata())["x-request-id"] == "m1"
    assert generator.requests[0].request_id.startswith("m1-")


async def test_a_cache_salt_gives_a_request_hashes_of_its_own(
    stub: pb_grpc.InferenceStub, generator: ScriptedGenerator
) -> None:
    for salt in ("", "a", "a", "b"):
        [_ async for _ in stub.Generate(pb.GenerateRequest(text="a", cache_salt=salt))]
    seeds = [request.hash_seed for request in generator.requests]
    assert seeds == [SEED, seeds[1], seeds[1], seeds[3]]
    assert len(set(seeds)) == 3
    with pytest.raises(grpc.aio.AioRpcError, match="cache_salt: has 257 characters; at most 256"):
        [_ async for _ in stub.Generate(pb.GenerateRequest(text="a", cache_salt="x" * 257))]


async def test_models_and_status(stub: pb_grpc.InferenceStub, channel: grpc.aio.Channel) -> None:
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.max_model_len) == (MODEL, 4096)
    answer = await pb_grpc.AdminStub(channel).Status(pb.StatusRequest(), metadata=key_metadata(OPERATOR))
    assert (answer.router_id, answer.queue.capacity) == ("router-0", 8)


async def test_admin_is_closed_to_whoever_has_no_operators_key(generator: ScriptedGenerator) -> None:
    for operators in ((), (OPERATOR,)):
        api = GrpcApi(make_frontend(generator), make_questions(status), operators=operators)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{await api.start('127.0.0.1', 0)}") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match=r"the operator key is missing .* --operator-key-file"):
                await pb_grpc.AdminStub(channel).Status(pb.StatusRequest())
            assert len((await pb_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest())).models) == 1
        await api.stop()


@pytest.mark.parametrize("timeout_s", [math.nan, math.inf, -1.0, 1e9])
@pytest.mark.parametrize("method", ["Sleep", "UpdateWeights"])
async def test_a_time_that_makes_no_sense_is_the_operators_fault(
    channel: grpc.aio.Channel, method: str, timeout_s: float
) -> None:
    asked = getattr(pb, f"{method}Request")(worker_id="decode-1", timeout_s=timeout_s)
    with pytest.raises(grpc.aio.AioRpcError, match=r"timeout_s: is .*, must be at least 0\.0") as caught:
        await getattr(pb_grpc.AdminStub(channel), method)(asked, metadata=key_metadata(OPERATOR))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_level_that_no_worker_has_is_refused(channel: grpc.aio.Channel) -> None:
    asked = pb.SleepRequest(worker_id="decode-1", level=2**32 - 1)
    with pytest.raises(grpc.aio.AioRpcError, match="level: is 4294967295, must be at least 0 and at most 2"):
        await pb_grpc.AdminStub(channel).Sleep(asked, metadata=key_metadata(OPERATOR))


async def test_a_long_id_that_nobody_remembers_is_told_in_short(channel: grpc.aio.Channel) -> None:
    asked = pb.ExplainRequest(request_id="x" * 100_000)
    with pytest.raises(grpc.aio.AioRpcError, match="request_id: no decision for 'xxx") as caught:
        await pb_grpc.AdminStub(channel).Explain(asked, metadata=key_metadata(OPERATOR))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_follows_readiness_and_says_so_to_watchers(generator: ScriptedGenerator) -> None:
    problem: list[str | None] = ["no worker can serve"]
    frontend = make_frontend(generator)
    changing = Frontend(
        **{name: getattr(frontend, name) for name in frontend.__slots__ if name != "not_ready"},
        not_ready=lambda: problem[0],
    )
    api = GrpcApi(changing, make_questions(status))
    port = await api.start("127.0.0.1", 0)
    async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types know blocking channels only
        for service in ("", "baton.v1.Inference"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == NOT_SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Inference"))
        seen = []
        async for answer in watch:
            seen.append(answer.status)
            if len(seen) == 1:
                problem[0] = None
            elif len(seen) == 2:
                problem[0] = "draining"
            else:
                break
        assert seen == [NOT_SERVING, SERVING, NOT_SERVING]
        await api.stop(grace_s=5)  # a watcher does not hold it up


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_reflection_lists_the_services(channel: grpc.aio.Channel, version: str) -> None:
    list_services = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    async for answer in list_services(iter([reflection_pb2.ServerReflectionRequest(list_services="")])):
        names = {service.name for service in answer.list_services_response.service}
    assert {"baton.v1.Inference", "baton.v1.Admin", "grpc.health.v1.Health"} <= names


async def test_stopping_lets_requests_end_within_the_grace(api: GrpcApi, stub: pb_grpc.InferenceStub) -> None:
    responses = aiter(stub.Generate(pb.GenerateRequest(text="a")))
    await anext(responses)
    await api.stop(grace_s=10)
    assert [response async for response in responses][-1].WhichOneof("event") == "finished"


async def test_stopping_cancels_what_outlives_the_grace(
    api: GrpcApi, stub: pb_grpc.InferenceStub, generator: ScriptedGenerator
) -> None:
    generator.stuck_at = 1
    call = stub.Generate(pb.GenerateRequest(text="a"))
    await call.read()
    async with asyncio.timeout(30):
        await api.stop(grace_s=0.1)
        await generator.cancelled.wait()


async def test_a_port_of_who_does_not_share_it_is_an_os_error(generator: ScriptedGenerator) -> None:
    api = GrpcApi(make_frontend(generator), make_questions(status))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="cannot listen on"):
        await api.start("127.0.0.1", taken.getsockname()[1])
    await api.stop()
