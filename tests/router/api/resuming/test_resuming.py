"""A stream that broke off goes on behind the last event that the client has, whatever the dialect and however the
answer was cut into pieces. The workers are scripted; all of the router is real."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton_proto.generated import inference_pb2 as pb
from baton_proto.token_counts import TokenCounts
from baton_proto.worker import Delta, Submit
from router.api.resuming.bookmark import Bookmark, Origin, Told
from router.requests.draw import Draw
from router.text.tokenizer import Tokenizer
from runtime.calls.answer import Answer, Choice, Usage
from runtime.calls.router import Client
from runtime.errors import InvalidRequestError
from tests.router.api.conversations import CALL, grpc_serving, serving, talking_frontend
from tests.router.http_client import USER
from tests.router.scripted_generator import ScriptedGenerator, logprobs_of, tiny_tokenizer
from tests.router.scripted_worker import Script, ScriptedWorker, tokens_of
from tests.router.small_router import routing
from tests.tiny_model import EOS_TOKEN_IDS

HEADER = "Last-Event-ID"
FIND = {"name": "find", "description": "", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
TEXTS = [
    "<think>So be it.</think>\n\nLet me see: caf\u00e9 \U0001f600\U0001f680 and so on.\n" + CALL + CALL,
    "Caf\u00e9 \U0001f600 \U0001f680 STO and then STOP and what is never said",
    "",
]
CHAT = {"messages": USER, "stream": True}
TOOLS = [{"type": "function", "function": FIND}]
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT | {"tools": TOOLS, "stream_options": {"include_usage": True}}),
    "chat of two": ("/v1/chat/completions", CHAT | {"n": 2, "stop": "STOP", "logprobs": True, "top_logprobs": 1}),
    "cut chat": ("/v1/chat/completions", CHAT | {"tools": TOOLS, "max_tokens": 12, "thinking_token_budget": 4}),
    "completion": (
        "/v1/completions",
        {"prompt": "a", "stream": True, "max_tokens": 99, "stop": ["STOP"], "logprobs": 1},
    ),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "stream": True, "echo": True, "max_tokens": 99}),
    "message": (
        "/v1/messages",
        {"messages": USER, "max_tokens": 500, "stream": True}
        | {"tools": [{"name": "find", "input_schema": FIND["parameters"]}]},
    ),
    "response with logprobs": (
        "/v1/responses",
        {"input": "a", "stream": True, "include": ["message.output_text.logprobs"], "max_output_tokens": 60},
    ),
    "response": ("/v1/responses", {"input": "a", "stream": True, "tools": [{"type": "function"} | FIND]}),
    "response with a custom tool": (
        "/v1/responses",
        {"input": "a", "stream": True, "tools": [{"type": "custom", "name": "find"}]},
    ),
}


def saying(rng: random.Random, tokenizer: Tokenizer, texts: Sequence[str]) -> Script:
    """Answers choice i with text i. Each time the tokens come in steps of other lengths."""

    async def say(worker: ScriptedWorker, submit: Submit) -> None:
        index = int(submit.request_id.rpartition("/")[2].partition(".")[0])
        text = texts[index % len(texts)]
        tokens = [*map(int, tokenizer.encode(text)), EOS_TOKEN_IDS[0]] if text else [EOS_TOKEN_IDS[0]]
        done = len(tokens_of(submit)) - submit.num_prompt_tokens
        left = tokens[done : submit.sampling.max_tokens]
        first = True
        while left:
            step, left = left[: (size := rng.choice([1, 1, 2, 3, 9]))], left[size:]
            finish = None if left else "stop" if step[-1] == EOS_TOKEN_IDS[0] else "length"
            wanted = submit.sampling.logprobs
            worker.send(
                Delta(
                    submit.request_id,
                    step,
                    [] if wanted is None else [logprobs_of(token, wanted) for token in step],
                    prompt_counts=TokenCounts() if first else None,
                    finish=finish,
                    stop_token=step[-1] if finish == "stop" else None,
                )
            )
            first = False
            for _ in range(rng.choice([0, 1, 5])):
                await asyncio.sleep(0)

    return say


@dataclass
class Served:
    http: httpx.AsyncClient
    grpc: Client
    worker: ScriptedWorker
    tokenizer: Tokenizer

    def say(self, *texts: str, seed: int = 0) -> None:
        self.worker.script = saying(random.Random(seed), self.tokenizer, texts)

    async def events(self, path: str, body: dict[str, Any], last: str = "") -> list[dict[str, Any]]:
        headers = {"accept": "text/event-stream"} | ({HEADER: last} if last else {})
        answer = await self.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return [dict(line.split(": ", 1) for line in event.split("\n")) for event in answer.text.split("\n\n") if event]

    async def refusal(self, path: str, body: dict[str, Any], last: str) -> dict[str, Any]:
        answer = await self.http.post(path, json=body, headers={HEADER: last})
        assert answer.status_code == 400, answer.text
        told: dict[str, Any] = answer.json()["error"]
        return told


@pytest.fixture
async def served(folder: Path) -> AsyncIterator[Served]:
    generator = ScriptedGenerator(tiny_tokenizer(folder))
    worker = ScriptedWorker("d0")
    async with routing(generator.tokenizer, worker) as router:
        frontend = replace(talking_frontend(generator, folder), generator=router.generator)
        async with serving(frontend) as server, grpc_serving(frontend) as api:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http, Client(f"127.0.0.1:{api.port}") as client:
                yield Served(http, client, worker, generator.tokenizer)


LAGGING = ("logprobs", "token_ids")


def atoms(events: Sequence[dict[str, Any]]) -> dict[int, list[Any]]:
    """What events say of each choice, in order: texts character by character, because where they are cut is chance."""
    said: dict[int, list[Any]] = {}
    for event in events:
        if event["data"] == "[DONE]":
            said.setdefault(-1, []).append("[DONE]")
            continue
        data = json.loads(event["data"])
        assert data.get("type", event.get("event")) == event.get("event")
        data.pop("sequence_number", None)
        if "response" in data:
            data["response"].pop("completed_at")
        if data.get("type") == "response.output_text.delta":
            said.setdefault(99, []).extend(data.pop("logprobs"))
        choices = data.get("choices") or [{"index": -1}]
        index = choices[0]["index"]
        for name in LAGGING:
            if tokens := _listed(choices[0].pop(name, None)):
                said.setdefault(index + 100, []).extend(tokens)
        said.setdefault(index, []).extend(_split(data))
    return said


def _listed(told: Any) -> list[Any]:
    if isinstance(told, dict):
        told = told.get("content") or [list(row) for row in zip(*told.values(), strict=True)]
    return told or []


def _split(data: dict[str, Any]) -> Iterator[str]:
    choice = (data.get("choices") or [{}])[0]
    finish, reason = choice.pop("finish_reason", None), choice.pop("stop_reason", None)
    for holder, name in _texts(data):
        text, holder[name] = holder[name], ""
        yield from [f"{json.dumps(data, sort_keys=True)} {sign}" for sign in text]
        if text:
            break
    else:
        if not finish and choice and choice.get("delta", {}) == {}:
            return  # an event for tokens without text
        if not finish:
            yield json.dumps(data, sort_keys=True)
    if finish:
        yield f"{json.dumps(data, sort_keys=True)} finish {finish} {reason}"


def _texts(data: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a delta has its text."""
    for choice in data.get("choices") or ():
        delta = choice.get("delta", {})
        yield from [(choice, "text")] if "text" in choice else []
        if "reasoning" in delta:
            delta.pop("reasoning_content")
        yield from [(delta, name) for name in ("content", "reasoning") if name in delta]
        yield from [(call["function"], "arguments") for call in delta.get("tool_calls", ())]
    delta = data.get("delta")
    if isinstance(delta, str):
        yield data, "delta"
    elif isinstance(delta, dict):
        yield from [(delta, name) for name in ("text", "thinking", "partial_json") if name in delta]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("texts", [TEXTS[:2], TEXTS[1:]])
async def test_a_stream_goes_on_behind_each_of_its_events(served: Served, asked: str, texts: Sequence[str]) -> None:
    path, body = ASKED[asked]
    if "logprobs" in asked:  # those of tokens without a text of their own come with others, by chance
        texts = ["a\U0001f600" * 20]
    served.say(*texts, *reversed(texts))
    whole = await served.events(path, body)
    wanted = atoms(whole)
    named = [at for at, event in enumerate(whole) if "id" in event]
    assert len({whole[at]["id"] for at in named}) == len(named) >= len(whole) - 1
    assert [int(whole[at]["id"].split(":")[2]) for at in named] == list(range(1, len(named) + 1))
    for at in named:
        served.say(*texts, *reversed(texts), seed=at)
        rest = await served.events(path, body, whole[at]["id"])
        assert atoms(whole[: at + 1] + rest) == wanted
        ids = [event["id"] for event in rest if "id" in event]
        assert [int(each.split(":")[2]) for each in ids] == list(range(at + 2, at + 2 + len(ids)))
        if "response" in asked:
            numbers = [json.loads(event["data"])["sequence_number"] for event in rest]
            assert numbers == list(range(at + 1, at + 1 + len(rest)))


@pytest.mark.parametrize("logprobs", [1, None])
async def test_over_grpc_a_stream_goes_on_behind_each_of_its_messages(served: Served, logprobs: int | None) -> None:
    """From its start, or from the tokens that the client has, which are not asked of a worker again."""
    sampling = pb.SamplingOptions(n=2, stop=["STOP"], logprobs=logprobs)
    tool = pb.Tool(name="find", parameters=json.dumps(FIND["parameters"]))
    messages = [pb.ChatMessage(role="user", content="a")]
    chat = pb.ChatMessages(messages=messages, tools=[tool], thinking_token_budget=3)
    request = pb.GenerateRequest(chat=chat, sampling=sampling)
    served.say(*TEXTS[:2])
    whole = [message async for message in served.grpc.stream(request)]
    assert [message.bookmark == "" for message in whole] == [message.HasField("finished") for message in whole]
    begun = 0
    for at, message in enumerate(whole[:-1]):
        request.resume_from = message.bookmark
        so_far = [pb.TokenIds(ids=choice.token_ids) for choice in (*spoken(whole[: at + 1])[0], *[Choice()] * 2)[:2]]
        for tokens in ([], so_far):
            served.say(*TEXTS[:2], seed=at)
            served.worker.submits.clear()
            del request.tokens_so_far[:]
            request.tokens_so_far.extend(tokens)
            began, *rest = [message async for message in served.grpc.stream(request)]
            assert (began.started, began.bookmark) == (whole[0].started, message.bookmark)
            assert spoken(whole[: at + 1] + rest) == spoken(whole)
            firsts = [submit for submit in served.worker.submits if submit.request_id.endswith(".1")]
            begun += sum(len(tokens_of(submit)) - submit.num_prompt_tokens for submit in firsts)
    assert (begun > 100) == (logprobs is None)


async def test_tokens_so_far_are_those_of_the_bookmark(served: Served) -> None:
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingOptions(max_tokens=50))
    served.say("Hello there.")
    whole = [message async for message in served.grpc.stream(request)]
    request.resume_from = whole[-3].bookmark
    tokens = spoken(whole[:-2])[0][0].token_ids
    wrong = r"tokens_so_far\[0\]: are not the tokens that were told"
    refusals = [
        (wrong, [tokens[:-1]]),
        (wrong, [[*tokens[:-1], tokens[-1] ^ 1]]),
        (r"tokens_so_far: has 2 entries; the answer has 1", [tokens, tokens]),
        (r"tokens_so_far\[0\]: token id 70000 is not in the vocabulary", [[*tokens[:-1], 70000]]),
    ]
    for problem, given in refusals:
        del request.tokens_so_far[:]
        request.tokens_so_far.extend(pb.TokenIds(ids=ids) for ids in given)
        with pytest.raises(grpc.aio.AioRpcError, match=problem):
            await served.grpc.generate(request)


def spoken(messages: Sequence[pb.GenerateResponse]) -> tuple[list[Choice], Usage]:
    answer = Answer()
    for message in messages:
        answer.add(message, 0.0)
    return answer.choices, answer.usage


async def test_the_answer_is_asked_for_with_the_seed_and_the_limit_that_it_had(served: Served) -> None:
    path, body = ASKED["chat of two"]
    served.say("A", "B")
    first = (await served.events(path, body))[0]["id"]
    asked = [submit.sampling for submit in served.worker.submits[-2:]]
    served.worker.max_model_len = 1000  # a smaller limit than there was, where the caller gives none
    await served.events(path, body, first)
    assert [submit.sampling for submit in served.worker.submits[-2:]] == asked
    assert asked[0].seed != asked[1].seed
    await served.events(path, body)
    assert served.worker.submits[-1].sampling.seed not in (asked[0].seed, asked[1].seed)


async def test_what_cannot_go_on_is_refused_with_the_header_named(served: Served) -> None:
    path, body = ASKED["message"]
    served.say("Hello there.")
    last = (await served.events(path, body))[3]["id"]
    origin, number, told = last.rsplit(":", 2)
    check = told.split(".")[3]
    refusals = {
        "other body": (body | {"max_tokens": 100}, last, "is the id of an event of another request"),
        "no stream": (body | {"stream": False}, last, "needs stream to be true"),
        "not ours": (body, "17", "is not the id of an event that this service sent"),
        "too long": (body, f"{origin}:{number}:{told.replace('.', '000.', 1)}", "is not the id of an event"),
        "more choices": (body, f"{last},1.1.1.0", "is not the id of an event"),
        "ended before its end": (body, f"{origin}:{number}:{told}+1", "is not the id of an event"),
        "nothing told of tokens": (body, f"{origin}:{number}:3.3.0.0", "is not the id of an event"),
        "other tokens": (body, f"{origin}:{number}:{told.replace(f'.{check}.', '.1.')}", "has other tokens"),
    }
    for name, (asked, bookmark, problem) in refusals.items():
        error = await served.refusal(path, asked, bookmark)
        assert error["message"].startswith(HEADER), name
        assert problem in error["message"], name
    served.say("Another answer.")
    assert "made again, the answer has other tokens" in (await served.refusal(path, body, last))["message"]
    served.say("H")  # an answer that ends before
    assert "made again, the answer has other tokens" in (await served.refusal(path, body, last))["message"]
    request = pb.GenerateRequest(text="a", resume_from="17")
    with pytest.raises(grpc.aio.AioRpcError, match=r"resume_from: is not the id of an event"):
        await served.grpc.generate(request)


@pytest.mark.parametrize(
    ("accept", "changes", "has_ids"),
    [
        ("*/*", {}, False),
        ("application/json", {}, False),
        ("text/event-stream", {}, True),
        ("text/event-stream, application/json", {"n": 16}, True),
        ("text/event-stream", {"n": 16, "prompt": ["a", "b"]}, False),
    ],
)
async def test_openais_events_have_ids_for_who_reads_events_by_their_standard(
    served: Served, accept: str, changes: dict[str, Any], has_ids: bool
) -> None:
    served.say("Hello.")
    body = {"prompt": "a", "stream": True, "max_tokens": 20} | changes
    answer = await served.http.post("/v1/completions", json=body, headers={"accept": accept})
    *lines, done = answer.text.split("\n\n")[:-1]
    assert all(line.startswith("id: " if has_ids else "data: ") for line in lines)
    assert done == "data: [DONE]"


async def test_a_response_that_has_gone_on_is_kept_once(served: Served) -> None:
    path, body = ASKED["response"]
    served.say("Hello there.")
    whole = await served.events(path, body)
    rest = await served.events(path, body, whole[4]["id"])
    first, again = (json.loads(events[-1]["data"])["response"] for events in (whole, rest))
    assert again["id"] == first["id"]
    assert (await served.http.get(f"/v1/responses/{first['id']}")).json()["output"] == first["output"]


def test_an_id_is_read_as_it_was_written() -> None:
    origin = Origin("a:b:c", Draw.fresh(), 4096, 2**32 - 1, 2)
    text = f"{origin}12:{Told(7, 3, 2, 99, True, 2**32 - 1)},{Told(1, 0, 1, 5, True)}+1"
    read = Bookmark.read(text, HEADER)
    assert (read.origin, read.number, read.ending) == (origin, 12, 1)
    assert read.told == [Told(7, 3, 2, 99, True, 2**32 - 1), Told(1, 0, 1, 5, True)]
    assert Bookmark.read(text.replace(".ffffffff", ""), HEADER).told[0].weights == 0, "as an earlier release writes it"
    for wrong in (text.replace("c:", "c", 1), text + " ", text.replace("+1", "+"), "\n" + text, ""):
        with pytest.raises(InvalidRequestError, match=HEADER):
            Bookmark.read(wrong, HEADER)
