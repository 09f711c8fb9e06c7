"""Cost of moving a prompt's KV from a prefill GPU to a decode GPU, measured through the whole service.

    python -m benchmarks.disaggregation --model 8b [--section ttft,prefill] [--out FOLDER]     (two GPUs)
    python -m benchmarks.disaggregation --model 0.6b --section ttft --prompts 8192 --vllm PYTHON     (on one GPU)
    python -m benchmarks.disaggregation --servers FILE --folder MODEL --section ttft     (vLLM servers that run already)
    python -m benchmarks.disaggregation --model tiny --prompts 256,512 --load-prompt 256      (on a CPU: does it run)
    python -m benchmarks.disaggregation --model tiny --section turns --prompts 4096,16384     (on a CPU)

`ttft`: one request at a time; the TTFT through a prefill and a decode worker minus the TTFT through a worker that does
both. `prefill`: prompt tokens per second of a prefill worker that ships all its KV, beside one that ships nothing.
`turns`: the TTFT of a conversation's second turn, of whose prefix the decode worker alone has the KV, over that of as
many tokens that nobody has.
Prompts are random token ids, and none is sent twice; weights are random. `--vllm`: workers with vLLM, by the
interpreter that has it. `--servers`: a prefill and a decode server as a list in YAML, entries of `external_workers`,
and the folder that they serve. What splitting gains under load is in whole_system.
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

import yaml
from rich.console import Console
from rich.table import Table

from baton.service.supervisor import Supervisor
from baton_proto.generated import inference_pb2 as pb
from benchmarks.machine import describe, write_result
from benchmarks.random_model import write_model
from benchmarks.shapes import SHAPES
from runtime.calls.answer import Piece
from runtime.calls.router import Client
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig

APART, TOGETHER = "1P + 1D", "aggregated"
ANSWER, QUESTION = 64, 64  # tokens of a first turn's answer, and of the user's part of the second turn
VLLM_KV = "16GiB"


@dataclass(slots=True)
class Timing:
    """One request."""

    ttft_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    served_by: list[str] = field(default_factory=list)


class Load:
    def __init__(self, model: str, arguments: argparse.Namespace) -> None:
        self._model = model
        self.arguments = arguments
        self._random = random.Random(arguments.seed)

    @asynccontextmanager
    async def service(self, prefill: int, decode: int, **placement: Any) -> Any:
        """A prefill worker, if there is one, runs all prompts, or those that the router places there."""
        arguments = self.arguments
        longest = max(*arguments.prompts, arguments.load_prompt) + 64
        changes: dict[str, Any] = {
            "router": {"http_port": 0, "grpc_port": 0, "placement": placement},
            "workers": {"prefill": prefill, "decode": decode, "ready_timeout_s": 180.0},
            "engine": {
                "block_size": arguments.block_size,
                "max_batch_tokens": arguments.max_batch_tokens,
                "max_running": 128,
                "max_model_len": longest,
            },
            "transfer": {"transport": arguments.transport},
        }
        if arguments.vllm:
            changes["workers"] |= {"engine": "vllm", "python": arguments.vllm}
            changes["engine"]["kv_memory"] = VLLM_KV  # vLLM measures what is free while others take it
        if arguments.servers:
            changes["workers"] |= {"prefill": 0, "decode": 0}
            both = yaml.safe_load(arguments.servers.read_text())
            servers = both if prefill else [both[-1] | {"role": "both"}]
            changes |= {"external_workers": servers}
            changes["engine"] = {"block_size": arguments.block_size}
        config = with_overrides(ServingConfig(model=self._model), changes, "benchmark")
        with tempfile.TemporaryDirectory() as logs:
            supervisor = Supervisor(config, log_dir=Path(logs))
            try:
                await supervisor.start()
                async with supervisor.client() as client:
                    yield client
            except BaseException:
                for log in sorted(Path(logs).iterdir()):
                    print(f"--- {log.name}\n{log.read_text()[-1500:]}", flush=True)
                raise
            finally:
                await supervisor.stop()

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(3, 500) for _ in range(length)]

    async def ask(self, client: Client, tokens: list[int], output: int) -> Timing:
        sampling = pb.SamplingOptions(max_tokens=output, temperature=1.0, ignore_eos=True)
        timing = Timing()
        begin_s = time.perf_counter()

        def on_piece(piece: Piece) -> None:
            if piece.token_ids and not timing.token_ids:
                timing.ttft_s = time.perf_counter() - begin_s
            timing.token_ids += piece.token_ids

        request = pb.GenerateRequest(tokens=pb.TokenIds(ids=tokens), sampling=sampling)
        answer = await client.generate(request, 600.0, on_piece)
        timing.served_by = [place.prefill_worker for place in answer.served_by]
        timing.cached_tokens = answer.usage.cached_tokens
        assert len(timing.token_ids) == output, timing.token_ids
        return timing

    def goal_ms(self, together_ms: float) -> float:
        """What a shipped prompt may take longer."""
        return 5 + 0.02 * together_ms if self.arguments.vllm or self.arguments.servers else 2 + 0.01 * together_ms

    async def closed(self, client: Client, prompt: int, output: int, requests: int, concurrency: int) -> float:
        """Requests per second while a constant number of them is in flight."""
        left = requests

        async def caller() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                await self.ask(client, self.prompt(prompt), output)

        begin_s = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(concurrency)))
        return requests / (time.perf_counter() - begin_s)


class Results:
    """What is measured in each service, and the rows of the result. Each service is started as rarely as possible."""

    def __init__(self, load: Load, sections: list[str]) -> None:
        self._load = load
        self._sections = sections
        self._ttft: dict[str, dict[int, float]] = {TOGETHER: {}, APART: {}}
        self._prefill: dict[str, float] = {}
        self._turns: list[dict[str, float]] = []

    async def measure(self) -> None:
        if {"ttft", "prefill"} & {*self._sections}:
            async with self._load.service(0, 1) as client:
                await self._one_by_one(client, TOGETHER)
            async with self._load.service(1, 1, local_prefill_tokens=0) as client:
                await self._one_by_one(client, APART)
        if "turns" in self._sections:
            async with self._load.service(1, 1) as client:
                for prompt in self._load.arguments.prompts:
                    await self._second_turns(client, prompt)

    async def _one_by_one(self, client: Client, way: str) -> None:
        load, arguments = self._load, self._load.arguments
        if "ttft" in self._sections:
            for prompt in arguments.prompts:
                timings = [await load.ask(client, load.prompt(prompt), 8) for _ in range(arguments.rounds + 2)][2:]
                assert all(timing.served_by[0] for timing in timings) == (way == APART), timings[0].served_by
                self._ttft[way][prompt] = statistics.median(timing.ttft_s for timing in timings) * 1e3
                print(f"ttft {way} {prompt}: {self._ttft[way][prompt]:.2f} ms", flush=True)
        if "prefill" in self._sections:
            await load.closed(client, arguments.load_prompt, 1, 8, 4)
            rate = await load.closed(client, arguments.load_prompt, 1, arguments.requests, 4)
            self._prefill[way] = rate * arguments.load_prompt
            print(f"prefill {way}: {self._prefill[way]:,.0f} tok/s", flush=True)

    async def _second_turns(self, client: Client, length: int) -> None:
        load, computed, held = self._load, [], []
        for _ in range(load.arguments.rounds):
            computed.append((await load.ask(client, load.prompt(length), 8)).ttft_s)
            begun = load.prompt(length - ANSWER - QUESTION)
            first = await load.ask(client, begun, ANSWER)
            await client.sleep("prefill-1")  # it forgets its prefixes
            await client.wake("prefill-1")
            second = await load.ask(client, [*begun, *first.token_ids, *load.prompt(QUESTION)], 8)
            assert second.cached_tokens >= length - QUESTION - 2 * load.arguments.block_size, second
            held.append(second.ttft_s)
        row = {"computed ms": statistics.median(computed) * 1e3, "held ms": statistics.median(held) * 1e3}
        ratio = statistics.median(one / other for one, other in zip(held, computed, strict=True))
        self._turns.append({"prompt": length, **row, "ratio": ratio, "goal": 0.6})
        print(f"turns {length}: {self._turns[-1]}", flush=True)

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
        if self._turns:
            rows["turns"] = self._turns
        return rows


SECTIONS = ("ttft", "prefill", "turns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, "tiny"], default="8b")
    parser.add_argument("--section", default=",".join(SECTIONS), help="of ttft, prefill, turns")
    parser.add_argument("--prompts", type=_numbers, default=[1024, 8192, 32768], help="tokens, of `ttft` and `turns`")
    parser.add_argument("--rounds", type=int, default=10, help="requests of each length, of `ttft` and `turns`")
    parser.add_argument("--load-prompt", type=int, default=8192, help="tokens")
    parser.add_argument("--requests", type=int, default=40, help="of `prefill`")
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--vllm", metavar="PYTHON", help="workers with vLLM, which this interpreter has")
    parser.add_argument("--servers", type=Path, metavar="FILE", help="vLLM servers, apart and the decode server alone")
    parser.add_argument("--folder", help="the model of the servers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the result")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.folder or str(write_model(Path(scratch) / "model", arguments.model))
        load = Load(model, arguments)
        measured = Results(load, arguments.section.split(","))
        asyncio.run(measured.measure())
    rows = measured.rows()
    for section in rows:
        _show(section, rows[section])
    if arguments.out is not None:
        settings = {key: str(value) for key, value in vars(arguments).items()}
        document = {"benchmark": "disaggregation", **describe(), "settings": settings, "results": rows}
        kind = "-servers" if arguments.servers else "-vllm" * bool(arguments.vllm)
        write_result(
            arguments.out / f"disaggregation-{arguments.model}{kind}-{'-'.join(rows)}.json",
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
