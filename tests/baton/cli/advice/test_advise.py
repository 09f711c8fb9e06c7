"""`baton advise` as a process, and what it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.advice.inputs import shipped_profiles
from baton.cli.app import app
from baton.cli.terminal.exit_codes import ExitCode

SHAPE = ("--rate", "20", "--input", "500-2000", "--output", "100-300")
QUICK = ("--requests", "500", "--seeds", "3")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["advise", *arguments])


def profile_of(tensor_parallel: int, folder: Path) -> str:
    path = folder / f"profile-{tensor_parallel}.yaml"
    path.write_text(
        f"engine: {{tensor_parallel: {tensor_parallel}}}\n"
        f"step_times: {{decode_floor_ms: {6 / tensor_parallel}}}\nplanner: {{targets: {{ttft_ms: 700}}}}\n"
    )
    return str(path)


def trace_of(folder: Path, lines: int = 300, length: int = 800, *, shared: bool = False) -> str:
    """`shared`: each prompt begins as the ones before it."""
    path = folder / "trace.jsonl"
    rows: list[dict[str, object]] = [
        {"timestamp": 3000 * (n // 10), "input_length": length, "output_length": 50} for n in range(lines)
    ]
    for number, row in enumerate(rows):
        row |= {"hash_ids": [0, number + 1]} if shared else {}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.timeout(600)  # it compiles the simulator, on cores that others may hold
def test_a_process_answers_with_a_table_a_picture_and_sentences(tmp_path: Path) -> None:
    picture = tmp_path / "advice.png"
    command = [sys.executable, "-m", "baton", "advise", "--model", "mock", "--gpus", "4", *SHAPE, *QUICK]
    done = subprocess.run([*command, "--plot", str(picture)], capture_output=True, text=True, timeout=500)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "4 mixed" in done.stdout
    assert "2P + 2D" in done.stdout
    assert "Recommended: " in done.stdout
    assert "Its steps beside answers last up to 50 ms" in done.stdout
    said = " ".join(done.stdout.split())
    assert re.search(r"Expected at 20 requests/s: TTFT mean [\d,]+ \+- [\d,]+, p50 .*; ITL mean .*; whole", said)
    assert "Splitting: the best split, " in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_profiles_of_several_sizes_of_workers_are_compared(tmp_path: Path) -> None:
    profiles = [part for size in (1, 2) for part in ("--profile", profile_of(size, tmp_path))]
    result = run(
        *profiles, "--gpus", "4", "--trace", trace_of(tmp_path), "--speed", "2", "--itl", "9", *QUICK, "--json"
    )
    assert result.exit_code == ExitCode.OK, result.output
    found = json.loads(result.stdout)
    assert found["targets"] == {"ttft_ms": 700.0, "itl_ms": 9.0, "attainment": 0.99}
    assert found["rate"] == pytest.approx(2 * 10 / 3, rel=0.01)
    names = {row["layout"] for row in found["layouts"]}
    assert names >= {"4 mixed", "2 mixed x 2 GPUs", "1P + 1D x 2 GPUs"}
    assert found["recommended"] in names
    assert {"rate", "mixed", "split", "gain"} <= found["curve"][0].keys()


def test_shipped_profiles_need_no_machine_and_hash_ids_say_what_is_cached(tmp_path: Path) -> None:
    assert {(one.gpu, one.model) for one in shipped_profiles()} == {("h100", "8b"), ("h200", "8b")}

    def ttft_ms(*, shared: bool) -> float:
        trace = trace_of(tmp_path, shared=shared)
        result = run("--gpu", "H100", "--model", "8b", "--gpus", "1", "--trace", trace, *QUICK, "--json")
        assert result.exit_code == ExitCode.OK, result.output
        (row,) = json.loads(result.stdout)["layouts"]
        assert set(row["ttft_ms"]) == set(row["plus_minus"]["ttft_ms"]) == {"mean", "p50", "p90", "p99"}
        return float(row["ttft_ms"]["mean"])

    assert ttft_ms(shared=True) < 0.7 * ttft_ms(shared=False)
    trace = trace_of(tmp_path, shared=True)
    refused = run("--gpu", "h100", "--model", "8b", "--gpus", "1", "--trace", trace, "--cached", "0.5")
    assert "its hash_ids say what is cached: leave --cached out" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (SHAPE, "--profile: give --profile FILE"),
        (("--gpu", "h100", *SHAPE), "--profile: give --profile FILE"),
        (
            ("--gpu", "a100", "--model", "8b", *SHAPE),
            "--gpu: there are measured steps of --gpu h100",
        ),
        (("--model", "mock"), "--rate: give --trace FILE, or all of"),
        (
            ("--model", "mock", "--rate", "5", "--input", "20-10", "--output", "5"),
            "neither a number of tokens nor a range",
        ),
        (("--model", "mock", *SHAPE, "--kv-tokens", "1000"), "--kv-tokens: a worker's 1,000 tokens cannot hold"),
        (("--model", "mock", *SHAPE, "--trace", "x.jsonl"), "--trace: has its own lengths"),
        (("--model", "mock", "--trace", "nowhere.jsonl"), "--trace: nowhere.jsonl: No such file"),
        (("--model", "mock", *SHAPE, "--speed", "2"), "--speed: wants --trace, and no --rate"),
        (
            ("--model", "mock", "--trace", "x.jsonl", "--rate", "5", "--speed", "2"),
            "--speed: wants --trace, and no --rate",
        ),
        (("--model", "mock", *SHAPE, "--seeds", "1"), "--seeds"),
    ],
)
def test_a_wrong_flag_is_named(arguments: tuple[str, ...], problem: str) -> None:
    result = run("--gpus", "2", *arguments)
    assert result.exit_code == ExitCode.USAGE
    assert problem in " ".join(result.stderr.replace("│", " ").split())


def test_advice_that_cannot_be_drawn_is_given_before_the_error() -> None:
    result = run("--gpus", "2", "--model", "mock", *SHAPE, *QUICK, "--plot", "a.nothing")
    assert result.exit_code == ExitCode.USAGE
    assert "Recommended: " in result.stdout
    assert "--plot: a.nothing" in result.stderr


def test_profiles_and_traces_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    two = profile_of(2, tmp_path)
    assert "--gpus: 1 are too few" in run("--gpus", "1", "--profile", two, *SHAPE).stderr
    twice = run("--gpus", "4", "--profile", two, "--profile", two, *SHAPE)
    assert "two of them have engine.tensor_parallel 2" in twice.stderr
    assert "one timestamp" in run("--gpus", "2", "--profile", two, "--trace", trace_of(tmp_path, 5)).stderr
    empty = run("--gpus", "2", "--profile", two, "--trace", trace_of(tmp_path, 20, length=0))
    assert "request 1 by time has 0 and 50 tokens" in empty.stderr
    small = tmp_path / "small.yaml"
    small.write_text("engine: {max_batch_tokens: 64, max_running: 64}")
    assert "engine.max_batch_tokens: 64 are no more" in run("--gpus", "2", "--profile", str(small), *SHAPE).stderr
