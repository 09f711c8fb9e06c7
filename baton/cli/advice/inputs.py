"""The inputs of `baton advise`: workers from profiles, and requests from a trace or from numbers."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from baton.bench.workload import TRACE_BLOCK, mean_rate, trace_lines
from baton.cli.profile import PROFILE_S, measured_profile, suited_config
from baton.cli.terminal.length_range import length_range
from runtime.config.overrides import with_overrides
from runtime.config.serving import ServingConfig, load_config
from runtime.config.step_times import StepTimes
from runtime.config.yaml_file import read_yaml
from runtime.errors import ConfigError
from simulator.advice.layouts import layouts
from simulator.advice.traffic import RandomTraffic, TraceTraffic, Traffic
from simulator.stepwise.fleet import Layout, WorkerKind

MAX_RUNNING = 256
KV_TOKENS = 524_288
LONGEST = 10_000_000  # tokens of a prompt or an answer


class Shipped(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of profiles.yaml."""

    gpu: str
    model: str
    kv_tokens: int
    step_times: StepTimes


def shipped_profiles() -> list[Shipped]:
    return msgspec.convert(read_yaml(Path(__file__).with_name("profiles.yaml")), list[Shipped])


class Workers:
    """The workers that layouts are made of. Of several profiles, the first one has targets and placement."""

    def __init__(
        self, profiles: Sequence[Path], model: str | None, kv_tokens: int | None, gpu: str | None = None
    ) -> None:
        """`kv_tokens` of one GPU; None: as shipped for it, or KV_TOKENS. Raises ConfigError, ModelError."""
        if bool(profiles) == bool(model):
            told = "give --profile FILE, of `baton profile --out`, or --model NAME to measure it, or --gpu and --model"
            raise ConfigError("--profile", told)
        configs: list[tuple[ServingConfig, dict[str, Any]]] = [
            (load_config(path), read_yaml(path) or {}) for path in profiles
        ]
        if gpu is not None:
            shipped = _shipped(gpu, model)
            configs = [(ServingConfig(step_times=shipped.step_times), {})]
            kv_tokens = kv_tokens or shipped.kv_tokens
        elif model is not None:
            configs = [(_measured(model), {})]
        self.config = configs[0][0]
        self._given: dict[str, Any] = configs[0][1].get("engine") or {}
        self.kinds = [self._kind(config, kv_tokens or KV_TOKENS) for config, _ in configs]
        sizes = [kind.gpus for kind in self.kinds]
        if len(set(sizes)) < len(sizes):
            raise ConfigError("--profile", f"two of them have engine.tensor_parallel {max(sizes, key=sizes.count)}")

    def layouts(self, gpus: int) -> tuple[list[Layout], list[Layout]]:
        """(mixed ones, splits). Raises ConfigError when the GPUs are too few for a worker."""
        mixed, splits = layouts(self.kinds, gpus)
        if not mixed:
            raise ConfigError("--gpus", f"{gpus} are too few: a worker takes {min(kind.gpus for kind in self.kinds)}")
        return mixed, splits

    def check_room(self, prompt: int, output: int) -> None:
        """Raises ConfigError when a worker's memory cannot hold the longest request."""
        room = min(kind.kv_tokens for kind in self.kinds)
        if prompt + output > room:
            problem = (
                f"a worker's {room:,} tokens cannot hold a request of {prompt:,} + {output:,}: give more, or leave"
            )
            raise ConfigError("--kv-tokens", f"{problem} such requests out")

    def _kind(self, config: ServingConfig, kv_tokens: int) -> WorkerKind:
        engine, tp, tokens = config.engine, config.engine.tensor_parallel, config.engine.max_batch_tokens
        running = engine.max_running if "max_running" in self._given else MAX_RUNNING
        if tokens <= running:
            problem = f"{tokens} are no more than the {running} sequences of engine.max_running: prompts would not run"
            raise ConfigError("engine.max_batch_tokens", problem)
        return WorkerKind(config.step_times, tp, kv_tokens * tp, running, tokens)


def _shipped(gpu: str, model: str | None) -> Shipped:
    known = shipped_profiles()
    for one in known:
        if (one.gpu, one.model) == (gpu.lower(), (model or "").lower()):
            return one
    pairs = ", ".join(f"--gpu {one.gpu} --model {one.model}" for one in known)
    raise ConfigError("--gpu", f"there are measured steps of {pairs}: take one of them, or --profile FILE")


def _measured(model: str) -> ServingConfig:
    config = suited_config(None, model, "advise")
    if model == "mock":  # its steps take what the configuration says
        return config
    return with_overrides(config, {"step_times": msgspec.to_builtins(measured_profile(config, PROFILE_S).times)})


def traffic(
    trace: Path | None,
    rate: float | None,
    speed: float | None,
    input_tokens: str | None,
    output_tokens: str | None,
    requests: int | None,
    cached: float | None,
) -> tuple[Traffic, float, tuple[int, int]]:
    """(the requests, how many come in a second, the longest prompt and answer). `requests`: how many; None, with a
    trace: all. Raises ConfigError, typer.BadParameter."""
    if speed is not None and (trace is None or rate is not None):
        raise ConfigError("--speed", "wants --trace, and no --rate: both say how fast the trace comes")
    if trace is not None:
        if input_tokens or output_tokens:
            raise ConfigError("--trace", "has its own lengths: leave --input and --output out")
        found = _traced(trace, requests, cached)
        return found, rate or found.rate * (speed or 1.0), (int(found.prompt.max()), int(found.output.max()))
    if rate is None or not input_tokens or not output_tokens:
        raise ConfigError("--rate", "give --trace FILE, or all of --rate, --input and --output")
    prompt, output = length_range(input_tokens, "--input"), length_range(output_tokens, "--output")
    for flag, (_, longest) in (("--input", prompt), ("--output", output)):
        if longest > LONGEST:
            raise ConfigError(flag, f"{longest} tokens are more than {LONGEST:,}")
    assert requests
    return RandomTraffic(prompt, output, requests, cached or 0.0), rate, (prompt[1], output[1])


def _traced(path: Path, limit: int | None, cached: float | None) -> TraceTraffic:
    """Requests of one timestamp are spread up to the next, because traces round their times."""
    lines = sorted(trace_lines(path, limit), key=lambda line: line.timestamp)
    for number, line in enumerate(lines):
        if not (0 < line.input_length <= LONGEST and 0 <= line.output_length <= LONGEST):
            lengths = f"{line.input_length} and {line.output_length} tokens"
            raise ConfigError("--trace", f"{path}: request {number + 1} by time has {lengths}, not 1 to {LONGEST:,}")
    mean_rate(lines, path)  # refuses a trace that has none
    groups = [list(group) for _, group in groupby(lines, key=lambda line: line.timestamp)]
    starts = [group[0].timestamp / 1e3 for group in groups]
    starts.append(2 * starts[-1] - starts[-2])
    times = [
        np.linspace(start, end, len(group), endpoint=False)
        for group, start, end in zip(groups, starts, starts[1:], strict=False)
    ]
    prompt, output = (np.array([getattr(line, name) for line in lines]) for name in ("input_length", "output_length"))
    ids = [line.hash_ids for line in lines] if any(line.hash_ids for line in lines) else []
    if ids and cached is not None:
        raise ConfigError("--cached", f"{path}: its hash_ids say what is cached: leave --cached out")
    return TraceTraffic(np.concatenate(times), prompt, np.maximum(1, output), cached or 0.0, ids, TRACE_BLOCK)
