"""Files and batches as OpenAI's own client asks for them, of a service whose routers die."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import Batch

from runtime.config.step_times import StepTimes
from tests.service import Service, running_service

ACME, OTHER = "a" * 40, "b" * 40
WAIT_S = 60.0
COMPLETIONS = "/v1/completions"
LINES = 4000
SLOW = msgspec.to_builtins(StepTimes().faster(2))
FAST = msgspec.to_builtins(StepTimes().faster(50))


def line(number: int, body: dict[str, Any] | None = None, url: str = COMPLETIONS) -> str:
    asked = {"prompt": f"prompt {number}", "max_tokens": 8} if body is None else body
    return json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": url, "body": asked}) + "\n"


def ids_of(content: str) -> list[str]:
    return [json.loads(each)["custom_id"] for each in content.splitlines()]


async def started(client: AsyncOpenAI, lines: Iterable[str], window: str = "24h", **more: Any) -> Batch:
    file = await client.files.create(file=("lines.jsonl", "".join(lines).encode()), purpose="batch")
    endpoint = more.pop("endpoint", COMPLETIONS)
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,
        completion_window=window,  # type: ignore[arg-type]
        **more,
    )


async def until(client: AsyncOpenAI, batch: Batch, *statuses: str) -> Batch:
    async with asyncio.timeout(WAIT_S):
        while (seen := await client.batches.retrieve(batch.id)).status not in statuses:
            await asyncio.sleep(0.05)
    return seen


async def content(client: AsyncOpenAI, file_id: str | None) -> str:
    assert file_id is not None
    return (await client.files.content(file_id)).text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    folder = tmp_path_factory.mktemp("batches")
    (folder / "keys").touch(0o600)
    (folder / "keys").write_text(f"{ACME} tenant=acme\n{OTHER}\n")
    sections = {
        "router": {"batch_folder": str(folder / "batches")},
        "security": {"api_key_file": str(folder / "keys")},
        "logging": {"usage": str(folder / "usage.jsonl")},
        "step_times": FAST,
    }
    async with running_service("mock", 0, 1, sections) as service:
        yield service


def client_of(service: Service, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key=key, max_retries=0)


@pytest_asyncio.fixture(loop_scope="module")
async def client(service: Service) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(service, ACME) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def other(service: Service) -> AsyncIterator[AsyncOpenAI]:
    """Of another tenant."""
    async with client_of(service, OTHER) as client:
        yield client


@pytest.mark.asyncio(loop_scope="module")
async def test_the_official_client_brings_a_file_and_reads_its_answers_and_its_errors(client: AsyncOpenAI) -> None:
    lines = [*map(line, range(100)), line(100, {"prompt": "x", "max_tokenz": 1}), "\n"]
    batch = await started(client, lines, metadata={"of": "tonight"})
    assert (batch.status, batch.metadata) == ("validating", {"of": "tonight"})
    ended = await until(client, batch, "completed", "failed")
    assert ended.request_counts is not None
    counts = ended.request_counts
    assert (ended.status, counts.total, counts.completed, counts.failed) == ("completed", 101, 100, 1)
    answers = [json.loads(each) for each in (await content(client, ended.output_file_id)).splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == sorted(f"line-{number}" for number in range(100))
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] == 8 for answer in answers)
    (refused,) = map(json.loads, (await content(client, ended.error_file_id)).splitlines())
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("line-100", 400)
    assert "max_tokens" in refused["response"]["body"]["error"]["message"]

    assert [each.id async for each in client.batches.list()] == [batch.id]
    files = [each async for each in client.files.list(limit=2)]
    assert {each.purpose for each in files} == {"batch", "batch_output"}
    assert (await client.files.retrieve(batch.input_file_id)).bytes == len("".join(lines))
    assert await content(client, batch.input_file_id) == "".join(lines)
    for each in files:
        assert (await client.files.delete(each.id)).deleted
    assert [each async for each in client.files.list()] == []


@pytest.mark.asyncio(loop_scope="module")
async def test_the_tokens_of_a_batch_count_for_its_caller(service: Service, other: AsyncOpenAI) -> None:
    ended = await until(other, await started(other, map(line, range(3))), "completed")
    ids = {json.loads(each)["id"] for each in (await content(other, ended.output_file_id)).splitlines()}
    assert service.config.logging.usage is not None
    usage = Path(service.config.logging.usage)
    async with asyncio.timeout(WAIT_S):
        while not ids <= {told["request_id"][:-9] for told in map(json.loads, usage.read_text().splitlines())}:
            await asyncio.sleep(0.05)
    told = [each for each in map(json.loads, usage.read_text().splitlines()) if each["request_id"][:-9] in ids]
    assert {each["key"] for each in told} == {each["tenant"] for each in told}
    assert {each["output_tokens"] for each in told} == {8}
    assert OTHER not in usage.read_text()
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {ACME}"}) as http:
        scraped = (await http.get(f"{service.http_url}/metrics")).text
    assert (
        f'baton_router_output_tokens_total{{key="{told[0]["key"]}",model="mock",tenant="{told[0]["key"]}"}} 24.0'
        in scraped
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_a_caller_sees_and_ends_nothing_of_another_tenant(client: AsyncOpenAI, other: AsyncOpenAI) -> None:
    batch = await until(client, await started(client, map(line, range(2))), "completed")
    assert batch.output_file_id is not None
    for ask in (
        other.files.retrieve(batch.output_file_id),
        other.files.content(batch.output_file_id),
        other.files.delete(batch.input_file_id),
        other.batches.retrieve(batch.id),
        other.batches.cancel(batch.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask
    with pytest.raises(openai.BadRequestError, match="input_file_id: there is no file"):
        await other.batches.create(input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h")
    assert batch.id not in [each.id async for each in other.batches.list()]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_file_with_faults_fails_as_a_whole_and_names_its_lines(client: AsyncOpenAI) -> None:
    stream = line(3, {"prompt": "x", "stream": True})
    faulty = [line(0), line(0), "{\n", line(2, url="/v1/chat/completions"), stream]
    batch = await until(client, await started(client, faulty), "completed", "failed")
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(fault.line, fault.code) for fault in batch.errors.data] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
        (4, "mismatched_url"),
        (5, "invalid_request"),
    ]
    empty = await until(client, await started(client, ["\n"]), "completed", "failed")
    assert empty.errors is not None
    assert [fault.code for fault in empty.errors.data or ()] == ["empty_file"]


@pytest.mark.asyncio(loop_scope="module")
async def test_chats_and_responses_are_lines_too(client: AsyncOpenAI) -> None:
    chat = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4}
    for url, body in (("/v1/chat/completions", chat), ("/v1/responses", {"input": "Who?", "max_output_tokens": 4})):
        batch = await started(client, [line(0, body, url)], endpoint=url)
        ended = await until(client, batch, "completed")
        (answer,) = map(json.loads, (await content(client, ended.output_file_id)).splitlines())
        assert answer["response"]["body"]["object"] in ("chat.completion", "response")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_batch_ends_when_it_is_cancelled_or_its_time_is_up(client: AsyncOpenAI) -> None:
    endless = [line(number, {"prompt": "x", "max_tokens": 20_000, "ignore_eos": True}) for number in range(50)]
    batch = await started(client, endless)
    await until(client, batch, "in_progress")
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    cancelled = await until(client, batch, "cancelled")
    assert (cancelled.output_file_id, cancelled.error_file_id) == (None, None)
    expired = await until(client, await started(client, endless, window="2s"), "expired")
    told = [json.loads(each) for each in (await content(client, expired.error_file_id)).splitlines()]
    assert [each["custom_id"] for each in told] == [f"line-{number}" for number in range(50)]
    assert {each["error"]["code"] for each in told} == {"batch_expired"}


async def holder_of(service: Service, marker: Path) -> str:
    """The router that works on the batch."""
    routers = [name for name in service.supervisor.children if name.startswith("router-")]
    async with asyncio.timeout(WAIT_S):
        while True:
            opened = {name: psutil.Process(service.pid(name)).open_files() for name in routers}
            holders = [name for name, files in opened.items() if str(marker) in [file.path for file in files]]
            if len(holders) == 1:
                return holders[0]
            await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
async def test_every_line_is_answered_once_though_its_router_is_killed_in_mid_batch(
    tmp_path: Path, replicas: int
) -> None:
    folder = tmp_path / "batches"
    router = {"batch_folder": str(folder), "replicas": replicas}
    async with (
        running_service("mock", 0, 2, router=router, step_times=SLOW) as service,
        AsyncOpenAI(base_url=f"{service.http_url}/v1", api_key="none", max_retries=9) as client,
    ):
        batch = await started(client, map(line, range(LINES)))
        await until(client, batch, "in_progress")
        (record,) = folder.glob(f"tenants/*/batches/{batch.id}.json")
        output = record.parents[1] / "files" / json.loads(record.read_text())["output"]
        for share in (1, 2):
            holder = await holder_of(service, folder / "active" / batch.id)
            async with asyncio.timeout(WAIT_S):
                while not output.exists() or output.read_text().count("\n") < LINES * share // 4:
                    await asyncio.sleep(0.02)
            service.kill(holder)
            assert (await service.supervisor.wait()).name == holder
            before = output.read_text()
            await service.supervisor.start_again(holder)
            service.note_pids()
            assert output.read_text().startswith(before[: before.rindex("\n") + 1])
        ended = await until(client, batch, "completed")
        ids = ids_of(await content(client, ended.output_file_id))
        assert len(ids) == LINES
        assert set(ids) == {f"line-{number}" for number in range(LINES)}
        assert ended.error_file_id is None
