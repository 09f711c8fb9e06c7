"""`baton bench`: what it asks, and what it measures of an engine and of a real service."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from typer.testing import CliRunner, Result

from baton import LLM
from baton.bench.in_process import run_engine
from baton.bench.measured import Timing, summed
from baton.bench.workload import NANO_VLLM_BENCH, Amount, at_random, mean_rate, random_ids, texts, trace_lines, traced
from baton.cli.app import app
from baton.cli.terminal.exit_codes import ExitCode
from runtime.config.serving import ServingConfig
from runtime.errors import ConfigError
from tests.service import Service, running_service
from tests.tiny_model import VOCAB_SIZE
from worker.engines.own import build_engine

SHORT = ("--prompt-tokens", "20-40", "--output-tokens", "8", "--json")
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(tiny_model: Path) -> AsyncIterator[Service]:
    async with running_service(tiny_model, 0, 1) as service:
        yield service


def _on_cpu(folder: Path) -> Path:
    file = folder.parent / "bench.yaml"
    file.write_text(json.dumps({"engine": {"device": "cpu", "kv_memory": "16MiB"}}))
    return file


async def measured(service: Service, *arguments: str) -> list[dict[str, Any]]:
    done = await asyncio.to_thread(run, "--address", service.http_url, *SHORT, *arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    points: list[dict[str, Any]] = json.loads(done.stdout)["points"]
    return points


async def test_the_usual_requests_are_those_of_nano_vllm() -> None:
    asks = random_ids(NANO_VLLM_BENCH, vocab_size=151_936)
    assert (len(asks), sum(output for _, output in asks)) == (256, 133_966)
    assert sum(len(prompt) for prompt, _ in asks) == 142_827
    assert max(max(prompt) for prompt, _ in random_ids(NANO_VLLM_BENCH, 100)) == 99


async def test_texts_have_the_words_that_the_tokens_take_and_come_at_random_times() -> None:
    asks = texts(Amount(200, (10, 10), (5, 7), seed=3), words_per_token=0.5)
    assert {len(ask.prompt.split()) for ask in asks} == {5}
    assert {ask.output_tokens for ask in asks} == {5, 6, 7}
    assert len({ask.prompt for ask in asks}) > 190
    placed = at_random(asks, per_s=10.0, seed=0)
    assert [ask.prompt for ask in placed] == [ask.prompt for ask in asks]
    assert placed[-1].at_s == pytest.approx(20, rel=0.3)


async def test_equal_hashes_of_a_trace_are_equal_text(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 800, "output_length": 0, "hash_ids": [1, 3]},
        {"timestamp": 6000, "input_length": 30, "output_length": 1},
    ]
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    lines = trace_lines(file)
    first, second, third = traced(lines, speed=2.0, words_per_token=1.0)
    assert [ask.at_s for ask in (first, second, third)] == [0.0, 1.5, 3.0]
    words = [ask.prompt.split() for ask in (first, second, third)]
    assert [len(text) for text in words] == [700, 800, 30]
    assert words[0][:512] == words[1][:512]
    assert words[0][512:600] != words[1][512:600]
    assert second.output_tokens == 1
    others = [ask.prompt.split() for ask in traced(lines, 2.0, 1.0, seed=1)]
    assert [len(text) for text in others] == [700, 800, 30]
    assert others[0][:512] == others[1][:512]
    assert all(other != text for other, text in zip(others, words, strict=True)), "another seed, another text"
    assert len(trace_lines(file, 2)) == 2
    assert mean_rate(lines, file) == pytest.approx(0.5)
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"--trace: .*bad\.jsonl: line 2: .*input_length"):
        trace_lines(tmp_path / "bad.jsonl")
    with pytest.raises(ConfigError, match="all requests have one timestamp"):
        mean_rate(lines[:1], file)


async def test_a_point_counts_whole_answers_alone() -> None:
    point = summed(
        "two",
        [
            Timing(1.0, [1.5, 1.6, 1.8], 1.8, 10, 3),
            Timing(2.0, [2.1], 3.0, 20, 2),
            Timing(0.0, [], 9.0, problem="gone"),
        ],
    )
    assert (point.requests, point.failed, point.problem, point.seconds) == (2, 1, "gone", 2.0)
    assert (point.output_tokens_per_s, point.total_tokens_per_s, point.events_per_token) == (2.5, 17.5, 0.8)
    assert (point.ttft_ms.mean, point.itl_ms.mean, point.request_ms.p50) == (300.0, 150.0, 900.0)


async def test_an_engine_in_process_answers_every_request(tmp_path: Path) -> None:
    done = await asyncio.to_thread(run, "--model", "mock", "-n", "12", *SHORT)
    assert done.exit_code == 0, done.output
    measured = json.loads(done.stdout.splitlines()[-1])
    (point,) = measured["points"]
    assert (measured["model"], point["requests"], point["output_tokens"]) == ("mock", 12, 96)
    assert point["ttft_ms"]["p50"] > 0
    too_long = await asyncio.to_thread(run, "--model", "mock", "-n", "1", "--prompt-tokens", "10000000")
    assert too_long.exit_code == ExitCode.USAGE
    assert "engine.max_model_len: a request has 10000" in too_long.stderr


@pytest.mark.timeout(300)
async def test_a_real_model_on_a_cpu_answers_every_request(tiny_model: Path) -> None:
    arguments = ("-n", "6", "--prompt-tokens", "20-60", "--output-tokens", "3-9", "--json")
    done = await asyncio.to_thread(run, "--model", str(tiny_model), "--config", str(_on_cpu(tiny_model)), *arguments)
    assert done.exit_code == 0, done.output
    (point,) = json.loads(done.stdout.splitlines()[-1])["points"]
    asks = random_ids(Amount(6, (20, 60), (3, 9)), VOCAB_SIZE)
    assert (point["requests"], point["output_tokens"]) == (6, sum(tokens for _, tokens in asks))
    assert point["prompt_tokens"] == sum(len(prompt) for prompt, _ in asks)
    assert 0 < point["ttft_ms"]["p50"] < point["request_ms"]["p50"] <= point["seconds"] * 1e3


async def test_an_engine_in_process_has_the_whole_machine_and_the_steps_of_llm(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[ServingConfig] = []

    def noted(config: ServingConfig, *_: Any) -> Any:
        built.append(config)
        raise ConfigError("engine", "is not wanted here")

    monkeypatch.setattr("baton.bench.in_process.build_engine", noted)
    monkeypatch.setattr("baton.service.launcher.uses_gpus", lambda *_: True)
    await asyncio.to_thread(run, "--model", str(tiny_model))
    monkeypatch.setattr("baton.llm.build_engine", noted)
    monkeypatch.setattr("engine.runners.auto.resolve_device", lambda _: torch.device("cuda"))
    for settings in ({}, {"max_batch_tokens": "auto"}):
        with pytest.raises(ConfigError, match="is not wanted here"):
            LLM(tiny_model, **settings)
    assert [(config.engine, config.workers) for config in built[1:]] == [(built[0].engine, built[0].workers)] * 2
    assert (built[0].workers.prefill, built[0].workers.decode) == (0, 1), "it shares cores and memory with no worker"
    assert built[0].planner.targets.itl_ms == 1000.0, "nobody waits for the next token"


async def test_all_requests_are_measured_from_before_the_first_one_is_added_and_a_step_has_one_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assembly = build_engine(ServingConfig(model="mock"))
    engine, steps = assembly.engine, []
    step, add = engine.step, engine.add
    begun_s: list[float] = []
    monkeypatch.setattr(engine, "add", lambda sequence: (begun_s.append(engine.clock()), add(sequence)))
    monkeypatch.setattr(engine, "step", lambda: steps.append(step()) or steps[-1])
    timings = run_engine(engine, [([1] * 30, 4), ([2] * 900, 7)], temperature=0.6)
    assembly.close()
    assert len({timing.sent_s for timing in timings}) == 1
    assert timings[0].sent_s <= begun_s[0]
    assert [(timing.prompt_tokens, timing.output_tokens, len(timing.tokens_s)) for timing in timings] == [
        (30, 4, 4),
        (900, 7, 7),
    ]
    assert timings[0].tokens_s[-1] == timings[0].ended_s < timings[1].ended_s
    assert len({at_s for timing in timings for at_s in timing.tokens_s}) <= len(steps)


async def test_a_sweep_measures_each_load_of_a_service(service: Service, tmp_path: Path) -> None:
    one, four = await measured(service, "--concurrency", "1,4", "-n", "8", "--plot", str(tmp_path / "sweep.png"))
    assert [one["load"], four["load"]] == ["1 at a time", "4 at a time"]
    for point in (one, four):
        assert (point["requests"], point["output_tokens"]) == (8, 64)
        assert 8 * 20 <= point["prompt_tokens"] <= 8 * 80
        assert 0 < point["ttft_ms"]["p50"] <= point["request_ms"]["p50"]
        assert point["events_per_token"] > 0
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    (rated,) = await measured(service, "--rate", "50", "-n", "6", "--chat")
    assert (rated["load"], rated["requests"]) == ("50 per s", 6)
    (crowd,) = await measured(service, "-n", "5", "-t", "0")
    assert (crowd["load"], crowd["output_tokens"]) == ("at once", 40)


async def test_the_latencies_are_those_of_the_service() -> None:
    step_times = {"prefill_floor_ms": 150.0, "decode_floor_ms": 30.0}
    async with running_service("mock", 0, 1, mock={"answer_tokens": 12}, step_times=step_times) as slow:
        (point,) = await measured(slow, "--concurrency", "1", "-n", "4")
    assert point["ttft_ms"]["p50"] > 150
    assert point["itl_ms"]["mean"] > 29, "that of single tokens may be less where two come together"
    assert 15 < point["itl_ms"]["p50"] < point["ttft_ms"]["p50"]
    assert point["events_per_token"] > 0.8


async def test_a_trace_is_played_to_a_service(service: Service, tmp_path: Path) -> None:
    lines = [{"timestamp": 300 * i, "input_length": 20, "output_length": 4} for i in range(4)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (point,) = await measured(service, "--trace", str(tmp_path / "trace.jsonl"), "--speed", "3")
    assert (point["load"], point["requests"], point["output_tokens"]) == ("trace", 4, 16)
    assert point["seconds"] > 0.3
    points = await measured(service, "--trace", str(tmp_path / "trace.jsonl"), "--rate", "8,80")
    assert [point["load"] for point in points] == ["trace, 8 per s", "trace, 80 per s"]
    assert points[0]["seconds"] > 3 / 8


async def test_the_table_warns_of_requests_that_failed(service: Service, tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": length, "output_length": 4} for length in (20, 2_000_000)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = await asyncio.to_thread(run, "--address", service.http_url, "--trace", str(tmp_path / "trace.jsonl"))
    assert done.exit_code == 0
    assert "TTFT ms P50" in done.stdout
    assert "warning: trace: 1 of 2 requests failed: " in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--concurrency", "1", "--rate", "2"], ExitCode.USAGE, "give it, or --rate and --trace"),
        (["--trace", "a", "--rate", "2", "--speed", "3"], ExitCode.USAGE, "give --speed or --rate"),
        (["--concurrency", "1"], ExitCode.USAGE, "want an address"),
        (["--address", "a", "--concurrency", "0,1"], ExitCode.USAGE, "no list of positive numbers"),
        (["--prompt-tokens", "9-3"], ExitCode.USAGE, "a range such as 100-1024"),
        (["--address", "ftp://a"], ExitCode.USAGE, "no URL such as http://127.0.0.1:8000"),
        (["--address", "127.0.0.1:1"], ExitCode.UNAVAILABLE, "nothing answers at"),
        (["--model", "/nowhere/at/all"], ExitCode.USAGE, "/nowhere/at/all"),
    ],
)
async def test_what_cannot_be_measured_is_said(arguments: list[str], code: ExitCode, words: str) -> None:
    done = await asyncio.to_thread(run, *arguments)
    assert done.exit_code == code
    assert words in " ".join(done.stderr.split())


async def test_a_service_that_refuses_says_why(service: Service) -> None:
    done = await asyncio.to_thread(run, "--address", service.http_url, "--model", "gpt-17")
    assert done.exit_code == ExitCode.UNAVAILABLE
    assert "answers 404: " in done.stderr
    assert "gpt-17" in done.stderr
