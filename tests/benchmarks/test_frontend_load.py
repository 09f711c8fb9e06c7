"""The load benchmark against a real service, with a handful of requests."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.frontend.cases import CASES, Case, bodies
from benchmarks.frontend.load_client import Load, LoadFailedError
from router.text.tokenizer import Tokenizer
from tests.tiny_model import VOCAB_SIZE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["chat", "tokens"])
def test_prompts_have_the_length_they_should_and_are_all_different(kind: str, tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model, VOCAB_SIZE)
    requests = bodies(Case("case", kind, 400, 8, 1), tokenizer, seed=1)
    made = [json.loads(body) for body, _ in zip(requests, range(40), strict=False)]
    assert all(body["max_tokens"] == 8 and body["stream"] for body in made)
    if kind == "tokens":
        prompts = [body["prompt"] for body in made]
        assert {len(prompt) for prompt in prompts} == {400}
        beginnings = {tuple(prompt[:300]) for prompt in prompts}
    else:
        prompts = [[message["content"] for message in body["messages"]] for body in made]
        assert all(360 < sum(len(tokenizer.encode(part)) for part in prompt) < 440 for prompt in prompts)
        beginnings = {(prompt[0],) for prompt in prompts}
    assert len({json.dumps(prompt) for prompt in prompts}) == 40
    assert len(beginnings) == 16


async def test_an_answer_that_is_no_stream_fails_the_load() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    gone = asyncio.Event()
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    with pytest.raises(LoadFailedError, match="503"):
        await Load(f"{host}:{port}", "/x", iter([b"{}"])).run(1, 0.1)
    server.close()
    await asyncio.wait_for(gone.wait(), 60)


def test_the_benchmark_runs_and_writes_its_figures(tiny_model: Path, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    arguments = ["--cases", "5,8", "--seconds", "0.2", "--rounds", "1", "--json", str(result)]
    command = [sys.executable, "-m", "benchmarks.frontend_load", "--tokenizer", str(tiny_model), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode in (0, 1), done.stderr  # 1: a goal is missed, on a busy machine
    document = json.loads(result.read_text())
    assert [row["case"] for row in document["rows"]] == [CASES[4].name, CASES[7].name]
    for row in document["rows"]:
        assert row["best"]["requests"] > 0
        assert 0 < row["best"]["ttft_p50_ms"] <= row["best"]["total_p50_ms"]
        assert row["best"]["router_cpu_ms"] > 0
