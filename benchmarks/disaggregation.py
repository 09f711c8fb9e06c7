"""Cost and gain of moving a prompt's KV from a prefill GPU to a decode GPU, measured through the whole service.

    python -m benchmarks.disaggregation --model 8b [--section ttft,prefill,load] [--out FOLDER]     (two GPUs)
    python -m benchmarks.disaggregation --model 0.6b --section ttft --prompts 8192 --vllm PYTHON     (on one GPU)
    python -m benchmarks.disaggregation --model mock --section load      (on a CPU)
    python -m benchmarks.disaggregation --model tiny --prompts 256,512 --load-prompt 256      (on a CPU: does it run)

`ttft`: one request at a time; the TTFT through a prefill and a decode worker minus the TTFT through a worker that does
both. `prefill`: prompt tokens per second of a prefill worker that ships all its KV, beside one that ships nothing.
`load`: one prefill and one decode worker against two workers that do both. Requests arrive at random, at a share of the
capacity of the weaker of the two services. When the prefill worker is full, the decode worker runs a prompt itself,
except with --wait-when-full. Prompts are random token ids, and none is sent twice; weights are random. `mock`: the mock
engine computes nothing and ships a few bytes, in steps as long as Qwen3-8B's on an H200; the rest of the service is
real. `--vllm`: workers with vLLM, by the interpreter that has it.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from baton.service.supervisor import Supervisor
from baton_proto.generated import inference_pb2 as pb
from benchmarks.machine import describe, write_result
from benchmarks.random_model import write_model
from benchmarks.shapes import SHAPES
from runtime.calls.router import Client
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig

APART, TOGETHER = "1P + 1D", "aggregated"
MOCK = "mock"
VLLM_KV = "16GiB"
MOCK_8B = {
    "step_times": {
        "prefill_floor_ms": 1.0,
        "prefill_token_ms": 0.0235,
        "prefill_pair_ms": 0.0000011,
        "decode_floor_ms": 5.5,
        "decode_sequence_ms": 0.02,
        "decode_token_ms": 0.0000343,
    },
    "mock": {"kv_blocks": 16384, "tokenizer": "smollm2"},  # its vocabulary holds the ids of the prompts
}


@dataclass(slots=True)
class Timing:
    """The times of one request, in seconds."""

    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between consecutive messages, from the first one on
    output_tokens: int = 0
    served_by: list[str] = field(default_factory=list)


class Load:
    def __init__(self, model: str, arguments: argparse.Namespace) -> None:
        self._model = model
        self.arguments = arguments
        self._random = random.Random(arguments.seed)

    @asynccontextmanager
    async def service(self, prefill: int, decode: int, when_full: bool) -> Any:
        """`when_full`: the decode worker runs a prompt where that costs less, as when the prefill worker is full."""
        arguments = self.arguments
        chunk = arguments.decode_batch_tokens if prefill else None
        longest = max(*arguments.prompts, arguments.load_prompt) + arguments.load_output + 64
        changes: dict[str, dict[str, Any]] = {
            "router": {"http_port": 0, "grpc_port": 0, "placement": {} if when_full else {"local_prefill_tokens": 0}},
            "workers": {"prefill": prefill, "decode": decode, "ready_timeout_s": 180.0},
            "engine": {
                "block_size": arguments.block_size,
                "max_batch_tokens": chunk or arguments.max_batch_tokens,
                "max_running": 128,
                "max_model_len": longest,
            },
            "transfer": {"transport": arguments.transport},
        }
        if arguments.model == MOCK:
            changes |= MOCK_8B
            changes["workers"]["per_process"] = 1
        if arguments.vllm:
            changes["workers"] |= {"engine": "vllm", "python": arguments.vllm}
            changes["engine"]["kv_memory"] = VLLM_KV  # vLLM measures what is free while others take it
        config = with_overrides(ServingConfig(model=self._model), changes, "benchmark")
        with tempfile.TemporaryDirectory() as logs:
            supervisor = Supervisor(config, log_dir=Path(logs))
            try:
                await supervisor.start()
                async with Client(supervisor.address("grpc")) as client:
                    yield client
            except BaseException:
                for log in sorted(Path(logs).iterdir()):
                    print(f"--- {log.name}\n{log.read_text()[-1500:]}", flush=True)
                raise
            finally:
                await supervisor.stop()

    async def ask(self, client: Client, prompt: int, output: int) -> Timing:
        tokens = [self._random.randrange(3, 500) for _ in range(prompt)]
        sampling = pb.SamplingOptions(max_tokens=output, temperature=1.0, ignore_eos=True)
        timing = Timing()
        begin_s = last_s = time.perf_counter()

        def on_piece(piece: pb.Piece) -> None:
            nonlocal last_s
            if not piece.token_ids:
                return
            now_s = time.perf_counter()
            if timing.output_tokens:
                timing.gaps_s.append(now_s - last_s)
            else:
                timing.ttft_s = now_s - begin_s
            timing.output_tokens += len(piece.token_ids)
            last_s = now_s

        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=tokens), sampling=sampling)
        answer = await client.generate(request, 600.0, on_piece)
        timing.served_by = [place.prefill_worker for place in answer.served_by]
        assert timing.output_tokens == output, timing.output_tokens
        return timing

    def goal_ms(self, together_ms: float) -> float:
        """What a shipped prompt may take longer."""
        return 5 + 0.02 * together_ms if self.arguments.vllm else 2 + 0.01 * together_ms

    async def closed(self, client: Client, prompt: int, output: int, requests: int, concurrency: int) -> float:
        """Requests per second while a constant number of them is in flight."""
        left = requests

        async def caller() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self.ask(client, prompt, output)

        begin_s = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(concurrency)))
        return requests / (time.perf_counter() - begin_s)

    async def poisson(self, client: Client, prompt: int, output: int, rate: float, seconds: float) -> list[Timing]:
        arrivals = np.cumsum(np.random.default_rng(self.arguments.seed).exponential(1 / rate, int(rate * seconds)))
        begin_s = time.perf_counter()

        async def one(at_s: float) -> Timing:
            await asyncio.sleep(max(0.0, begin_s + at_s - time.perf_counter()))
            return await self.ask(client, prompt, output)

        return await asyncio.gather(*(one(float(at_s)) for at_s in arrivals))


class Results:
    """What is measured in each service, and the rows of the result. Each service is started as rarely as possible."""

    def __init__(self, load: Load, sections: list[str]) -> None:
        self._load = load
        self._sections = sections
        self._ttft: dict[str, dict[int, float]] = {TOGETHER: {}, APART: {}}
        self._prefill: dict[str, float] = {}
        self._capacity: dict[str, float] = {}
        self._loaded: dict[str, list[Timing]] = {}

    async def measure(self) -> None:
        load, when_full = self._load, not self._load.arguments.wait_when_full
        if {"ttft", "prefill"} & set(self._sections):
            async with load.service(0, 1, when_full=False) as client:
                await self._one_by_one(client, TOGETHER)
            async with load.service(1, 1, when_full=False) as client:
                await self._one_by_one(client, APART)
        if "load" in self._sections:
            async with load.service(1, 1, when_full) as client:
                await self._measure_capacity(client, APART)
            async with load.service(0, 2, when_full) as client:
                await self._measure_capacity(client, TOGETHER)
                await self._under_load(client, TOGETHER)
            async with load.service(1, 1, when_full) as client:
                await self._under_load(client, APART)

    async def _one_by_one(self, client: Client, way: str) -> None:
        load, arguments = self._load, self._load.arguments
        if "ttft" in self._sections:
            for prompt in arguments.prompts:
                timings = [await load.ask(client, prompt, 8) for _ in range(arguments.rounds + 2)][2:]
                assert all(timing.served_by[0] for timing in timings) == (way == APART), timings[0].served_by
                self._ttft[way][prompt] = statistics.median(timing.ttft_s for timing in timings) * 1e3
                print(f"ttft {way} {prompt}: {self._ttft[way][prompt]:.2f} ms", flush=True)
        if "prefill" in self._sections:
            await load.closed(client, arguments.load_prompt, 1, 8, 4)
            rate = await load.closed(client, arguments.load_prompt, 1, arguments.requests, 4)
            self._prefill[way] = rate * arguments.load_prompt
            print(f"prefill {way}: {self._prefill[way]:,.0f} tok/s", flush=True)

    async def _measure_capacity(self, client: Client, way: str) -> None:
        load, arguments = self._load, self._load.arguments
        await load.closed(client, arguments.load_prompt, 8, 8, 8)
        self._capacity[way] = await load.closed(
            client, arguments.load_prompt, arguments.load_output, arguments.requests * 2, 32
        )
        print(f"capacity {way}: {self._capacity[way]:.2f} requests/s", flush=True)

    @property
    def _rate(self) -> float:
        arguments = self._load.arguments
        return float(arguments.rate or arguments.share * min(self._capacity.values()))

    async def _under_load(self, client: Client, way: str) -> None:
        load, arguments = self._load, self._load.arguments
        await load.closed(client, arguments.load_prompt, 8, 8, 8)
        self._loaded[way] = await load.poisson(
            client, arguments.load_prompt, arguments.load_output, self._rate, arguments.seconds
        )

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        rows: dict[str, list[dict[str, Any]]] = {}
        if "ttft" in self._sections:
            together, apart = self._ttft[TOGETHER], self._ttft[APART]
            rows["ttft"] = [
                {
                    "prompt": prompt,
                    "aggregated ms": together[prompt],
                    "1P + 1D ms": apart[prompt],
                    "more ms": apart[prompt] - together[prompt],
                    "goal ms": self._load.goal_ms(together[prompt]),
                }
                for prompt in together
            ]
        if "prefill" in self._sections:
            lost = 100 * (1 - self._prefill[APART] / self._prefill[TOGETHER])
            rows["prefill"] = [{"prompt": self._load.arguments.load_prompt, **self._prefill, "lost %": lost}]
        if "load" in self._sections:
            rows["load"] = [self._loaded_row(way, timings) for way, timings in self._loaded.items()]
        return rows

    def _loaded_row(self, way: str, timings: list[Timing]) -> dict[str, Any]:
        gaps = np.array([gap for timing in timings for gap in timing.gaps_s]) * 1e3
        firsts = np.array([timing.ttft_s for timing in timings]) * 1e3
        return {
            "way": way,
            "requests/s": self._rate,
            "of capacity": self._rate / self._capacity[way],
            "TTFT p50": float(np.median(firsts)),
            "TTFT p99": float(np.quantile(firsts, 0.99)),
            "ITL p50": float(np.median(gaps)),
            "ITL p99": float(np.quantile(gaps, 0.99)),
            "prompts run by decoders %": 100.0 * statistics.mean(not timing.served_by[0] for timing in timings),
        }


SECTIONS = ("ttft", "prefill", "load")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, "tiny", MOCK], default="8b")
    parser.add_argument("--section", default=",".join(SECTIONS))
    parser.add_argument("--prompts", type=_numbers, default=[1024, 8192, 32768], help="tokens, of `ttft`")
    parser.add_argument("--rounds", type=int, default=10, help="requests of each length, of `ttft`")
    parser.add_argument("--load-prompt", type=int, default=8192, help="tokens")
    parser.add_argument("--load-output", type=int, default=256, help="tokens")
    parser.add_argument("--requests", type=int, default=40, help="of `prefill`; twice as many for each capacity")
    parser.add_argument("--share", type=float, default=0.7, help="of the capacity that `load` offers")
    parser.add_argument("--seconds", type=float, default=30.0, help="of `load`")
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--prefill-batch-tokens", type=int, help="of the prefill worker; default: the same")
    parser.add_argument("--decode-batch-tokens", type=int, help="of the decode worker beside it; default: the same")
    parser.add_argument("--wait-when-full", action="store_true", help="`load` with all prompts shipped")
    parser.add_argument("--rate", type=float, help="requests/s of `load`, whatever the capacity")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--vllm", metavar="PYTHON", help="workers with vLLM, which this interpreter has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = MOCK if arguments.model == MOCK else str(write_model(Path(scratch) / "model", arguments.model))
        load = Load(model, arguments)
        measured = Results(load, arguments.section.split(","))
        asyncio.run(measured.measure())
    rows = measured.rows()
    for section in rows:
        _show(section, rows[section])
    if arguments.out is not None:
        settings = {key: str(value) for key, value in vars(arguments).items()}
        document = {"benchmark": "disaggregation", **describe(), "settings": settings, "results": rows}
        write_result(
            arguments.out / f"disaggregation-{arguments.model}{'-vllm' * bool(arguments.vllm)}-{'-'.join(rows)}.json",
            document,
        )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _show(section: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=section)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{value:,.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
