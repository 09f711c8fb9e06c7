"""Each row of SamplingParams reaches the engine from both APIs, within its bounds; one that is forgotten fails here."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import httpx
import pytest

from baton_proto.generated import inference_pb2 as pb, inference_pb2_grpc as pb_grpc
from baton_proto.sampling import PARAMETERS, Parameter, SamplingParams
from router.api.serving.app import create_app
from router.api.serving.grpc_api import GrpcApi
from tests.router.http_client import CHAT, COMPLETION
from tests.router.operator_questions import make_questions
from tests.router.scripted_generator import ScriptedGenerator, make_frontend, tiny_tokenizer
from tests.tiny_model import VOCAB_SIZE

OTHERS = ("grammar", "bad_words", "vllm_xargs", "logprob_token_ids", "repetition_detection")
NUMBERS_AND_LISTS = [row for row in PARAMETERS.values() if row.name not in OTHERS]
"""tests/router/api/wishes/test_grammar_fields.py and test_validation.py have the others."""
ROWS = pytest.mark.parametrize("row", NUMBERS_AND_LISTS, ids=[row.name for row in NUMBERS_AND_LISTS])
OPTIONS_OF_THE_ROUTER = {"stop", "n"}  # no engine sees them


class Refusal(NamedTuple):
    text: str


Ask = Callable[[str, Any], Awaitable[SamplingParams | Refusal]]


@pytest.fixture
async def apis(tiny_model: Path) -> AsyncIterator[dict[str, Ask]]:
    """API -> what becomes of one sampling parameter that is sent to it."""
    generator = ScriptedGenerator(tiny_tokenizer(tiny_model))
    frontend = make_frontend(generator)
    api = GrpcApi(frontend, make_questions())
    await api.start("127.0.0.1", 0)
    transport = httpx.ASGITransport(create_app(frontend, lambda: b""))
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{api.port}") as channel,
        httpx.AsyncClient(transport=transport, base_url="http://router") as http,
    ):
        stub = pb_grpc.InferenceStub(channel)

        async def over_grpc(name: str, value: Any) -> SamplingParams | Refusal:
            sampling = pb.SamplingOptions(**{name: value})
            try:
                async for _ in stub.Generate(pb.GenerateRequest(text="Hi", sampling=sampling), timeout=60):
                    pass
            except grpc.aio.AioRpcError as error:
                return Refusal(error.details() or "")
            return generator.requests[-1].sampling[0]

        def over_http(path: str, body: dict[str, Any]) -> Ask:
            async def ask(name: str, value: Any) -> SamplingParams | Refusal:
                asked = {name: value}
                if name == "logprobs" and path == "/v1/chat/completions":
                    asked = {"logprobs": True, "top_logprobs": value}
                answer = await http.post(path, json=body | asked)
                if answer.status_code != 200:
                    return Refusal(answer.json()["error"]["message"])
                return generator.requests[-1].sampling[0]

            return ask

        yield {
            "grpc": over_grpc,
            "chat": over_http("/v1/chat/completions", CHAT),
            "completions": over_http("/v1/completions", COMPLETION),
        }
    await api.stop()


def good_value(row: Parameter) -> Any:
    """An allowed value other than the default; a float that 32 bits hold exactly."""
    match row.default:
        case bool():
            return not row.default
        case tuple():
            return (5, 7)
        case dict():
            return {5: row.rule.high}
    return 0.5 if isinstance(row.default, float) else 3


def bad_values(row: Parameter) -> list[tuple[Any, str, str]]:
    """(value, field, limit) for each bound."""
    match row.default:
        case bool():
            return []
        case tuple():
            return [((VOCAB_SIZE,), row.name, f"is not in the vocabulary, 0 to {VOCAB_SIZE - 1}")]
        case dict():
            return [
                ({VOCAB_SIZE: 1.0}, row.name, f"is not in the vocabulary, 0 to {VOCAB_SIZE - 1}"),
                ({5: row.rule.high + 1.0}, f"{row.name}[5]", f"at most {row.rule.high}"),
                ({5: row.rule.low - 1.0}, f"{row.name}[5]", f"at least {row.rule.low}"),
            ]
    rule, bad = row.rule, []
    if rule.high is not None:
        bad.append((rule.high + 1, row.name, f"at most {rule.high}"))
    if rule.low is not None:
        bad.append((rule.low - 1, row.name, f"{'above' if rule.open_below else 'at least'} {rule.low}"))
    if rule.open_below:
        bad.append((rule.low, row.name, f"above {rule.low}"))
    return bad


def test_the_protocol_has_a_field_for_each_row() -> None:
    assert {field.name for field in pb.SamplingOptions.DESCRIPTOR.fields} == {*PARAMETERS, *OPTIONS_OF_THE_ROUTER}


@ROWS
async def test_it_reaches_the_engine_from_every_api(apis: dict[str, Ask], row: Parameter) -> None:
    value = good_value(row)
    for api, ask in apis.items():
        params = await ask(row.name, value)
        assert isinstance(params, SamplingParams), (api, params)
        assert getattr(params, row.name) == value, api


@ROWS
async def test_it_is_bounded_with_field_and_limit(apis: dict[str, Ask], row: Parameter) -> None:
    for value, field, limit in bad_values(row):
        for api, ask in apis.items():
            negative = isinstance(value, int) and value < 0
            if api == "grpc" and negative:
                continue  # the protocol's field has no sign
            refusal = await ask(row.name, value)
            name = "top_" + field if (field, api) == ("logprobs", "chat") else field
            assert isinstance(refusal, Refusal), (api, value)
            assert refusal.text.startswith(f"{name}: "), (api, refusal)
            assert limit in refusal.text, (api, refusal)


@ROWS
async def test_every_number_has_bounds(row: Parameter) -> None:
    if not isinstance(row.default, bool | tuple):
        assert row.rule.low is not None
        assert row.rule.high is not None or row.name in ("max_tokens", "min_tokens")  # the context bounds these
    assert not math.isnan(row.rule.low or 0.0)
