"""Client and AsyncClient against a real service, and what they say where there is none."""

import asyncio
import math
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import baton
from baton import AsyncClient, Client
from baton.client import service_status as shown
from baton.client.chat import CHAT_FIELDS
from baton.client.request import SAMPLING, Options, generate_request
from baton_proto.generated import inference_pb2 as pb
from runtime.calls import answer as said
from runtime.errors import ConfigError, DeadlineError, InvalidRequestError, UnavailableError
from tests.service import Service, running_service

pytestmark = pytest.mark.asyncio(loop_scope="module")
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service() -> AsyncIterator[Service]:
    async with running_service("mock", 1, 2, router={"placement": {"local_prefill_tokens": 0}}) as service:
        yield service


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(service: Service) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(service.grpc_address) as client:
        yield client


async def blocking(service: Service, work: Callable[[Client], Any]) -> Any:
    """`work` with a Client in a thread, while this loop goes on."""

    def run() -> Any:
        with Client(service.grpc_address) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def until_nothing_runs(client: AsyncClient) -> None:
    async with asyncio.timeout(60):
        while (await client.status()).queue.running:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (said.TopLogprob, pb.TopLogprob),
        (said.TokenLogprob, pb.TokenLogprob),
        (said.Usage, pb.Usage),
        (said.ServedBy, pb.ServedBy),
        (said.Piece, pb.Piece),
        (shown.Model, pb.Model),
        (shown.WorkerStatus, pb.WorkerStatus),
        (shown.QueueStatus, pb.QueueStatus),
        (shown.Totals, pb.Totals),
        (shown.Status, pb.StatusResponse),
        (shown.WorkerSleep, pb.SleepResponse),
    ],
)
async def test_plain_answers_have_the_fields_of_the_protocol(kind: Any, message: Any) -> None:
    assert {field.name for field in fields(kind)} == {field.name for field in message.DESCRIPTOR.fields}


async def test_options_are_those_of_the_protocol() -> None:
    own = {"model", "request_id", "priority", "cache_salt", "keep_cache_s", "prompt_cache_key", "drop_cache"}
    assert Options.__annotations__.keys() - own == {*SAMPLING, *CHAT_FIELDS}
    assert own <= {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}


RAIN = {"name": "rain", "description": "When it rains.", "parameters": {"type": "object"}}
SENT_RAIN = pb.Tool(name="rain", description="When it rains.", parameters='{"type": "object"}')


async def test_tools_are_sent_and_an_answer_goes_back_as_a_message() -> None:
    choice = said.Choice(content="So:", reasoning="Hm.", tool_calls=[said.ToolCall("c1", "rain", '{"day": 1}')])
    openai_call = {"id": "c2", "type": "function", "function": {"name": "rain", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": "When?"},
        choice.message(),
        {"role": "tool", "tool_call_id": "c1", "content": "5 pm"},
        {"role": "assistant", "content": None, "tool_calls": [openai_call]},
    ]
    tools: list[Any] = [RAIN | {"strict": True}, {"type": "function", "function": RAIN}]
    wanted = Options(
        tools=tools,
        tool_choice="required",
        allowed_tools=["rain"],
        parallel_tool_calls=False,
        template_variables={"a": True},
        thinking_token_budget=50,
        reasoning_effort="low",
    )
    sent = generate_request(messages, {"max_tokens": 5}, wanted).chat
    assert sent == pb.ChatMessages(
        messages=[
            pb.ChatMessage(role="user", content="When?"),
            pb.ChatMessage(
                role="assistant",
                content="So:",
                reasoning="Hm.",
                tool_calls=[pb.ToolCall(id="c1", name="rain", arguments='{"day": 1}')],
            ),
            pb.ChatMessage(role="tool", tool_call_id="c1", content="5 pm"),
            pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c2", name="rain", arguments="{}")]),
        ],
        tools=[
            pb.Tool(name="rain", description="When it rains.", parameters=SENT_RAIN.parameters, strict=True),
            SENT_RAIN,
        ],
        tool_choice=pb.TOOL_CHOICE_REQUIRED,
        parallel_tool_calls=False,
        template_variables='{"a": true}',
        allowed_tools=["rain"],
        thinking_token_budget=50,
        reasoning_effort="low",
    )


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("text", {"tools": [RAIN]}, "tools"),
        ([{"role": "user"}], {"tools": ["rain"]}, "tools[0]"),
        ([{"role": "user"}], {"tools": [RAIN, {"title": "b"}]}, "tools[1]"),
        ([{"role": "user"}], {"tool_choice": "rain"}, "tool_choice"),
        ([{"role": "user", "tool_calls": [{"name": 5}]}], {}, "messages[0].tool_calls[0].name"),
    ],
)
async def test_what_a_chat_cannot_say_is_refused_with_its_field(prompt: Any, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        generate_request(prompt, None, options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("grammar", "sent"),
    [
        ({"json_schema": {"type": "integer"}}, pb.Grammar(json_schema='{"type": "integer"}')),
        ({"choice": ["yes", "no"]}, pb.Grammar(choice=pb.Alternatives(texts=["yes", "no"]))),
        ({"json_object": True}, pb.Grammar(json_object=pb.JsonObject())),
        ({"regex": "[ab]+"}, pb.Grammar(regex="[ab]+")),
    ],
    ids=str,
)
async def test_a_grammar_is_written_in_pythons_types(grammar: dict[str, object], sent: pb.Grammar) -> None:
    assert generate_request("a", None, {"grammar": grammar}).sampling.grammar == sent
    with pytest.raises(InvalidRequestError, match="grammar"):
        generate_request("a", None, {"grammar": {"jsn": "a"}})


async def test_import_baton_loads_neither_grpc_nor_torch() -> None:
    code = "import baton, sys; assert not {'grpc', 'torch', 'google.protobuf'} & sys.modules.keys(); baton.Client"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)
    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        _ = baton.Clinet


async def test_a_text_its_tokens_and_a_stream_give_the_same_answer(client: AsyncClient) -> None:
    whole = await client.generate("Once upon a time", GREEDY, logprobs=1)
    assert (len(whole.token_ids), whole.finish_reason) == (8, "length")
    assert [len(token.top) for token in whole.logprobs] == [1] * 8
    assert (whole.usage.completion_tokens, whole.served_by[0].prefill_worker) == (8, "prefill-1")
    assert 0 < whole.ttft_s <= whole.duration_s
    stream = client.stream("Once upon a time", SimpleNamespace(**GREEDY))
    pieces = [piece async for piece in stream]
    assert "".join(piece.text for piece in pieces) == whole.text == stream.answer.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert stream.answer.usage.prompt_tokens == whole.usage.prompt_tokens
    again = await client.generate([5, 6, 7], GREEDY, seed=1)
    assert again.usage.prompt_tokens == 3


async def test_a_question_is_a_chat_of_one_message_and_keywords_go_before_sampling(client: AsyncClient) -> None:
    asked = await client.chat("Who?", GREEDY, max_tokens=3)
    listed = await client.generate([{"role": "user", "content": "Who?"}], GREEDY, max_tokens=3)
    assert asked.token_ids == listed.token_ids
    assert asked.usage.prompt_tokens == listed.usage.prompt_tokens
    assert len(asked.token_ids) == 3
    assert len((await client.chat("Who?", GREEDY, n=2)).choices) == 2


async def test_the_blocking_client_says_the_same(service: Service, client: AsyncClient) -> None:
    expected = await client.chat("Who?", GREEDY)

    def work(blocking: Client) -> None:
        assert blocking.chat("Who?", GREEDY).token_ids == expected.token_ids
        assert blocking.generate([{"role": "user", "content": "Who?"}], GREEDY).text == expected.text
        stream = blocking.stream([{"role": "user", "content": "Who?"}], **GREEDY)
        assert "".join(piece.text for piece in stream) == expected.text
        assert stream.answer.token_ids == expected.token_ids
        assert [model.id for model in blocking.models()] == [expected.model]
        assert {worker.worker_id for worker in blocking.status().workers} == {"prefill-1", "decode-1", "decode-2"}

    await blocking(service, work)


async def test_it_works_where_an_event_loop_runs_and_leaves_no_thread(service: Service) -> None:
    threads = {*threading.enumerate()}
    client = Client(service.grpc_address)
    first = client.generate("Once", GREEDY).text
    client.close()
    client.close()
    assert first
    with pytest.raises(UnavailableError, match="this client is closed"):
        client.status()
    forgotten = Client(service.grpc_address)
    forgotten.status()
    del forgotten
    assert not {thread for thread in threading.enumerate() if thread.name == "baton client"} - threads


async def test_a_client_that_is_closed_says_so_to_who_waits_and_to_who_comes(service: Service) -> None:
    long = {"max_tokens": 4000, "ignore_eos": True}

    def work(blocking: Client) -> None:
        stream = blocking.stream("Once", long)
        next(stream)
        with ThreadPoolExecutor(1) as threads:
            rest = threads.submit(lambda: [*stream])
            blocking.close()
            with pytest.raises(UnavailableError, match="this client is closed"):
                rest.result(20)

    await blocking(service, work)
    client = AsyncClient(service.grpc_address)
    async with client.stream("Once", long) as stream:
        await anext(stream)
        await client.close()
        with pytest.raises(UnavailableError, match="this client is closed"):
            async for _ in stream:
                pass
    with pytest.raises(UnavailableError, match="this client is closed"):
        await client.generate("Once", GREEDY)
    never_open = AsyncClient(service.grpc_address)
    await never_open.close()
    with pytest.raises(UnavailableError, match="this client is closed"):
        await never_open.models()


@pytest.mark.parametrize("timeout_s", [1e12, 1e300, math.inf, 10**400, np.float32(30), np.int64(30)])
async def test_a_time_of_any_length_is_no_deadline_that_has_passed(client: AsyncClient, timeout_s: Any) -> None:
    assert (await client.generate("Once", GREEDY, timeout_s=timeout_s)).token_ids


@pytest.mark.parametrize("timeout_s", [math.nan, "1"])
async def test_what_is_no_time_is_refused(client: AsyncClient, timeout_s: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^timeout_s: is .*, must be a number of seconds$"):
        await client.generate("Once", GREEDY, timeout_s=timeout_s)


@pytest.mark.parametrize("prompt", [None, 5, b"abc", {"text": "a"}, {1, 2}, np.array(5)])
async def test_what_is_no_prompt_is_refused_by_its_type(client: AsyncClient, prompt: Any) -> None:
    name = type(prompt).__name__
    with pytest.raises(InvalidRequestError, match=f"^prompt: must be a text, token ids or messages, not {name}$"):
        await client.generate(prompt, GREEDY)


async def test_calls_of_a_client_that_another_thread_closes_answer_or_say_that_it_is_closed(service: Service) -> None:
    def go_on(client: Client, begun: threading.Event) -> None:
        while True:
            client.models()
            begun.set()

    def call_on(client: Client, begun: threading.Event) -> None:
        with pytest.raises(UnavailableError, match="this client is closed"):
            go_on(client, begun)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            client, begun = Client(service.grpc_address), threading.Event()
            callers = [threads.submit(call_on, client, begun) for _ in range(4)]
            await asyncio.to_thread(begun.wait, 20)
            await asyncio.to_thread(client.close)
            for caller in callers:
                await asyncio.wait_for(asyncio.wrap_future(caller), 60)


async def test_token_ids_may_be_an_array(client: AsyncClient) -> None:
    told = await client.generate([5, 6, 7], GREEDY)
    array: Any = np.array([5, 6, 7])
    assert (await client.generate(array, GREEDY)).token_ids == told.token_ids


async def test_a_closed_stream_ends_its_request_in_the_service(service: Service, client: AsyncClient) -> None:
    long = {"max_tokens": 4000, "ignore_eos": True}
    async with client.stream("Once", long) as stream:
        assert (await anext(stream)).token_ids
        assert (await client.status()).queue.running == 1
    await until_nothing_runs(client)

    def leave(blocking: Client) -> None:
        for _ in blocking.stream("Once", long):
            assert blocking.status().queue.running == 1
            break  # nobody holds the stream any more
        while blocking.status().queue.running:
            pass

    await blocking(service, leave)


async def test_ctrl_c_leaves_a_waiting_program_and_its_request_ends(service: Service, client: AsyncClient) -> None:
    code = f"""
import baton
with baton.Client({service.grpc_address!r}) as client:
    try:
        client.generate("Once", max_tokens=4000, ignore_eos=True)
    except KeyboardInterrupt:
        print("left", client.status().router_id)
"""
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=-1, stderr=-1)
    async with asyncio.timeout(60):
        while not (await client.status()).queue.running:
            await asyncio.sleep(0.01)
        program.send_signal(signal.SIGINT)
        stdout, stderr = await program.communicate()
    assert (stdout, stderr) == (b"left router-1\n", b"")
    await until_nothing_runs(client)


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("a", {"temperature": 9.0}, "temperature: .*2"),
        ("a", {"temprature": 1.0}, "temprature: is not known here; the nearest known field is 'temperature'"),
        ("a", {"max_tokens": "many"}, "max_tokens: cannot be 'many'"),
        ("a", {"model": "gpt-17"}, "model: 'gpt-17' is not served here"),
        ([100_000], {}, "tokens.ids.*100000"),
        ([], {}, "tokens.ids.*empty"),
        (["a"], {}, r"ids: cannot be \['a'\]"),
        ([{"role": "user", "text": "a"}], {}, r"messages\[0\]: 'text' is not known here"),
    ],
)
async def test_what_is_refused_names_its_field(client: AsyncClient, prompt: Any, options: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        await client.generate(prompt, **options)
    assert str(refused.value).startswith(f"{refused.value.field}: ")


@pytest.mark.parametrize("model", [None, 7])
async def test_weights_that_no_path_names_are_refused_before_anybody_is_asked(model: Any) -> None:
    async with AsyncClient("127.0.0.1:1") as nobody:
        with pytest.raises(InvalidRequestError, match=f"model: is {model}, must be the path of a folder"):
            await nobody.update_weights(model)


async def test_sampling_that_says_nothing_is_refused(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError, match="sampling: 'greedy' is no mapping"):
        await client.generate("a", "greedy")


async def test_a_deadline_ends_the_request(client: AsyncClient) -> None:
    with pytest.raises(DeadlineError, match=r"within 0\.3 s"):
        await client.generate("Once", max_tokens=4000, ignore_eos=True, timeout_s=0.3)
    await until_nothing_runs(client)


async def test_workers_sleep_and_wake_one_by_one_and_all_at_once(client: AsyncClient) -> None:
    slept = await client.sleep("decode-2")
    assert (slept.state, slept.asleep) == ("sleeping", ["weights", "kv_cache"])
    assert (await client.wake("decode-2", ["weights"])).asleep == ["kv_cache"]
    everyone = await client.sleep_all(level=2)
    assert {worker: outcome.state for worker, outcome in everyone.items()} == dict.fromkeys(
        ("prefill-1", "decode-1", "decode-2"), "sleeping"
    )
    assert {outcome.state for outcome in (await client.wake_all()).values()} == {"ready"}
    refused = await client.wake_all(["kv"])
    problem = "tags: 'kv' is none of weights, kv_cache"
    assert [*map(str, refused.values())] == [f"{worker} {problem}" for worker in refused]
    with pytest.raises(InvalidRequestError, match="worker_id: there is no worker 'decode-9'"):
        await client.sleep("decode-9")
    async with asyncio.timeout(60):
        while {worker.state for worker in (await client.status()).workers} != {"ready"}:
            await asyncio.sleep(0.01)


async def test_where_nobody_listens_the_way_out_is_said_at_once() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(UnavailableError, match="`baton up` starts a service here"):
        client.status()
    with (
        Client("nobody-s-service") as client,
        pytest.raises(ConfigError, match="no service 'nobody-s-service'"),
    ):
        client.status()


async def test_a_key_and_a_certificate_are_named_when_they_are_missing(service: Service, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--ca-file: .*nowhere\.pem: No such file"):
        await AsyncClient(service.grpc_address, ca=tmp_path / "nowhere.pem").status()
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigError, match="holds no certificate"):
        await AsyncClient(service.grpc_address, ca=tmp_path / "empty.pem").status()
    with pytest.raises(ConfigError, match="api_key: holds no key"):
        AsyncClient(service.grpc_address, api_key="")
