"""The comparison of whole systems: its traffics, its figures, and a small run of it."""

import csv
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from baton.bench.measured import Timing
from baton.bench.workload import TraceLine
from benchmarks.whole.document import merged
from benchmarks.whole.figures import ITL_MS, TTFT_MS, Run, carried, estimate, ratio, summed_up
from benchmarks.whole.report import Comparison, Expectation
from benchmarks.whole.servers import parse_system, running
from benchmarks.whole.traces import AGENTS, CODE, CONVERSATIONS, shareable, traffic
from runtime.errors import ConfigError, UnavailableError
from runtime.processes.ports import free_port

LONGEST = 30_000


def test_agents_have_the_lengths_and_the_shared_beginnings_that_are_told_of_them() -> None:
    drawn = [traffic(AGENTS, {}, 240, seed, LONGEST) for seed in range(3)]
    lines = [line for one in drawn for line in one]
    assert sum(line.input_length for line in lines) / len(lines) == pytest.approx(13_000, rel=0.01)
    assert sum(line.output_length for line in lines) / len(lines) == pytest.approx(156, rel=0.01)
    assert sum(map(shareable, drawn)) / 3 == pytest.approx(0.87, abs=0.005)
    assert all(len(line.hash_ids) == -(-line.input_length // 512) for line in lines)
    assert drawn[0] == traffic(AGENTS, {}, 240, 0, LONGEST) != drawn[1]


def test_seeds_are_windows_of_a_recorded_trace_and_requests_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    rows = [{"timestamp": n, "input_length": 600 + n, "output_length": 9, "hash_ids": [n, n + 1]} for n in range(800)]
    rows[3]["input_length"] = LONGEST
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = (traffic(CONVERSATIONS, {CONVERSATIONS: path}, 50, seed, LONGEST) for seed in (0, 1))
    assert [line.input_length for line in first] == [600 + n for n in range(51) if n != 3]
    assert second[0].input_length == 601 + 700
    assert first[-1].timestamp == pytest.approx(50_000, rel=0.4), "one request a second"
    with pytest.raises(ConfigError, match="799 requests of at most 30000 tokens, too few for 100 of seed 1"):
        traffic(CONVERSATIONS, {CONVERSATIONS: path}, 100, 1, LONGEST)
    with pytest.raises(ConfigError, match="--conversations: give the file"):
        traffic(CONVERSATIONS, {CONVERSATIONS: None}, 1, 0, LONGEST)


def test_prompts_of_the_code_trace_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "code.csv"
    with path.open("w") as file:
        rows = csv.writer(file)
        rows.writerows([("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("2023", "700", "5"), ("2023", "900", "0")])
    lines = traffic(CODE, {CODE: path}, 2, 0, LONGEST)
    assert [(line.input_length, line.output_length) for line in lines] == [(700, 5), (900, 1)]
    assert shareable(lines) == 0
    path.write_text("nothing\n1\n")
    with pytest.raises(ConfigError, match=r"--code: .*ContextTokens"):
        traffic(CODE, {CODE: path}, 2, 0, LONGEST)


def test_a_beginning_is_shared_up_to_the_first_block_that_is_new() -> None:
    lines = [TraceLine(0, 1024, 1, [1, 2]), TraceLine(1, 1300, 1, [1, 3, 2]), TraceLine(2, 700, 1, [1, 3])]
    assert shareable(lines) == (512 + 700) / (1024 + 1300 + 700)


def test_an_answer_of_another_length_is_counted_as_wrong_and_as_late() -> None:
    lines = [TraceLine(n, 10, tokens) for n, tokens in enumerate((3, 5, 3, 1))]
    timings = [
        Timing(0.0, [0.4, 0.42, 0.44], 0.45, 10, 3),
        Timing(1.0, [1.1, 1.2, 1.3], 1.4, 10, 4),
        Timing(2.0, [4.5, 4.6], 4.7, 10, 3),  # two tokens came together
        Timing(3.0, [], 3.1, problem="gone"),
    ]
    run = summed_up("mixed", ("agents", 6.0), 2, lines, timings)
    assert (run.wrong, run.requests, run.output_tokens) == (2, 4, 6)
    assert run.problem == "an answer of 4 tokens, where 5 were asked for"
    assert run.figures["TTFT mean"] == pytest.approx((400 + 2500) / 2)
    assert run.figures["ITL mean"] == pytest.approx((20 + 20 + 100) / 3, rel=1e-4)
    assert run.figures["answer s"] == pytest.approx((0.45 + 2.7) / 2)
    by_target = {
        (ttft, itl): share
        for ttft, row in zip(TTFT_MS, run.in_time, strict=True)
        for itl, share in zip(ITL_MS, row, strict=True)
    }
    assert by_target[500.0, 15.0] == 0
    assert by_target[500.0, 25.0] == by_target[2000.0, 100.0] == 0.25
    assert by_target[4000.0, 50.0] == 0.5, "100 ms for two tokens"


def test_estimates_are_over_seeds_and_ratios_are_of_those_seeds_that_both_have() -> None:
    assert estimate([1.0, 2.0, 3.0]).plus_minus == pytest.approx(4.30 / 3**0.5)
    assert ratio({0: 1.0, 1: 4.0, 2: 9.0}, {0: 2.0, 1: 4.0}).mean == 0.75


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({2.0: 0.8, 4.0: 1.0}, ("<", 2.0)),
        ({4.0: 0.95, 2.0: 1.0}, (">=", 4.0)),
        ({2.0: 1.0, 4.0: 0.8, 6.0: 0.95}, ("", pytest.approx(3.0))),
    ],
)
def test_a_rate_is_carried_as_far_as_nine_tenths_are_in_time(
    shares: dict[float, float], expected: tuple[str, float]
) -> None:
    assert carried(shares) == expected


def a_run(system: str, seed: int, factor: float = 1.0, wrong: int = 0) -> Run:
    timings = [Timing(n, [n + 0.2 * factor, n + 0.21 * factor], n + factor, 10, 2) for n in range(4)]
    lines = [TraceLine(n, 10, 3 if n < wrong else 2) for n in range(4)]
    return summed_up(system, ("conversations", 4.0), seed, lines, timings)


def test_goals_that_are_missed_are_said() -> None:
    runs = [a_run(system, seed, factor) for system, factor in (("vllm", 1.0), ("mixed", 0.95)) for seed in (0, 1)]
    assert Comparison(runs, []).missed() == [
        "mixed, conversations at 4/s: TTFT mean 0.95 of vllm's, not 0.9",
        "mixed, conversations at 4/s: ITL p99 0.95 of vllm's, not 0.35",
        "mixed, conversations at 4/s: answer s 0.95 of vllm's, not 0.9",
    ]
    split = [*(a_run("mixed", seed) for seed in (0, 1)), *(a_run("split", seed, 1.02) for seed in (0, 1))]
    assert Comparison(split, []).missed() == ["split, conversations at 4/s: ITL p99 1.02 of mixed's, not 1"]
    told = [Expectation("mixed", "conversations", 4.0, 0, {"TTFT p50": 240.0, "TTFT p99": 210.0})]
    assert Comparison([a_run("mixed", 0)], told).missed() == [
        "mixed, conversations at 4/s: advised TTFT p50 1.20 of the measured"
    ]
    assert "1 of 4 answers are wrong: an answer of 2" in Comparison([a_run("mixed", 0, wrong=1)], []).missed()[0]


def test_the_lead_is_over_the_rate_that_the_best_of_vllms_step_sizes_carries() -> None:
    def run(system: str, rate: float, in_time: float) -> Run:
        share = [[in_time] * len(ITL_MS) for _ in TTFT_MS]
        return msgspec.structs.replace(a_run(system, 0), rate=rate, in_time=share)

    peers = [run("vllm", 2.0, 1.0), run("vllm", 4.0, 0.8), run("vllm:2048", 2.0, 1.0), run("vllm:2048", 4.0, 0.85)]
    ours = [run("mixed", 2.0, 1.0), run("mixed", 4.0, 0.9), run("mixed", 6.0, 0.5), run("split", 6.0, 0.7)]
    comparison = Comparison(peers + ours, [])
    assert comparison.lead("conversations", 0, 0) == ("", pytest.approx(4 / (10 / 3)))
    assert "conversations: 1.20 of the rate that vLLM carries, not 1.4" in comparison.missed()
    assert Comparison(peers + ours[:2], []).lead("conversations", 0, 0) == (">=", pytest.approx(1.2))
    assert Comparison(ours, []).lead("conversations", 0, 0) is None


@pytest.mark.parametrize(
    ("text", "workers"),
    [("vllm", (0, 4)), ("mixed:2048", (0, 4)), ("split", (2, 2)), ("3P+1D", (3, 1))],
)
def test_a_system_is_known_by_its_name(text: str, workers: tuple[int, int], tmp_path: Path) -> None:
    system = parse_system(text, 4)
    assert (system.prefill, system.decode) == workers
    command = system.command("folder", 80, tmp_path, "vllm serve {model}", None)
    assert ("engine.max_batch_tokens=2048" in command) == (text == "mixed:2048")
    assert (command[:3] == ["vllm", "serve", "folder"]) == (text == "vllm")


@pytest.mark.parametrize("text", ["sglang", "mixed:many", "3P+0D"])
def test_a_system_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is none of vllm, mixed, split"):
        parse_system(text, 2)


DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
SERVER = f"""
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Pages).serve_forever()
"""


def test_a_server_ends_with_all_its_processes(tmp_path: Path) -> None:
    port, log = free_port("127.0.0.1"), tmp_path / "log"
    with running([sys.executable, "-c", SERVER, str(port)], port, log, 30.0) as ready_s:
        child = int(log.read_text().split()[0])
        assert 0 < ready_s < 30
        assert psutil.Process(child).is_running()
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port))


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no GPU here'); raise SystemExit(3)"]
    with (
        pytest.raises(UnavailableError, match=r"(?s)ended with 3 after .*no GPU here"),
        running(command, free_port("127.0.0.1"), tmp_path / "log", 30.0),
    ):
        pass


def compared(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.whole_system", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mixed_and_split_workers_are_compared_without_a_gpu_and_parts_are_merged(tmp_path: Path) -> None:
    arguments = ["--model", "mock", "--gpus", "2", "--traces", "agents", "--rates", "8", "--requests", "3"]
    arguments += ["--warm-up", "2", "--seeds", "0"]
    for system in ("mixed", "split"):
        done = compared(*arguments, "--systems", system, "--out", str(tmp_path / system))
        assert done.returncode in (0, 1), done.stderr
    both = compared("--merge", *(str(tmp_path / system / "runs.json") for system in ("mixed", "split")), "--advise",
                      "--out", str(tmp_path / "both"))  # fmt: skip
    assert "split, agents at 8/s: " in both.stdout or both.returncode == 0, both.stderr
    document = json.loads((tmp_path / "both" / "runs.json").read_text())
    assert [(run["system"], run["wrong"]) for run in document["runs"]] == [("mixed", 0), ("split", 0)]
    assert len(document["commands"]) == 2
    for run, told in zip(document["runs"], document["expectations"], strict=True):
        assert run["output_tokens"] == sum(line.output_length for line in traffic(AGENTS, {}, 3, run["seed"], LONGEST))
        assert 0 < run["figures"]["TTFT p50"] <= run["figures"]["answer s"] * 1e3
        assert told["figures"]["TTFT p50"] > 0
    assert (tmp_path / "mixed" / "logs" / "mixed" / "router-1.log").exists()
    with pytest.raises(ConfigError, match=r"--merge: .*: leave one of them out"):
        merged([tmp_path / "mixed" / "runs.json"] * 2)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_comparison_that_is_ended_leaves_no_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.whole_system", "--model", "mock", "--traces", "agents", "--rates", "1"]
    command += ["--systems", "mixed", "--requests", "100", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as comparison:
        assert comparison.stdout is not None
        assert "ready" in comparison.stdout.readline()
        left = psutil.Process(comparison.pid).children(recursive=True)
        assert len(left) >= 4, "baton up, NATS, a router and workers"
        comparison.send_signal(signal.SIGTERM)
        assert comparison.wait(100) == 143
    assert not psutil.wait_procs(left, timeout=10)[1]
