"""What a vLLM server's /metrics say of each rank: its load, its cache, and how long its steps take."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Final, Self
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

PREFIX: Final = "vllm:"
CACHE = "cache_config_info"
NUMBERS: Final = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "prompt_tokens_total",
)
PATH: Final = "/metrics/?" + urlencode([("name[]", PREFIX + name) for name in (*NUMBERS, CACHE)])
"""Asks for these alone, because the process that makes the page sends the tokens. Without its last / vLLM's path has
all."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """Of one rank. Sums since the server's start, but for the first three numbers."""

    numbers: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NUMBERS, 0.0))
    block_size: int = 0  # 0: not told
    num_blocks: int = 0
    caches: bool = True  # prefixes are kept

    @classmethod
    def read(cls, page: bytes) -> dict[int, Self]:
        """The ranks of the server in their order, by the number that vLLM gives each. Raises ValueError."""
        numbers: dict[int, dict[str, float]] = {}
        caches: dict[int, dict[str, str]] = {}
        for sample in _samples(page):
            name, rank = sample.name.removeprefix(PREFIX), int(sample.labels.get("engine", "0"))
            if name == CACHE:
                caches[rank] = sample.labels
            else:
                numbers.setdefault(rank, dict.fromkeys(NUMBERS, 0.0))[name] += sample.value
        return {rank: cls._of(numbers[rank], caches.get(rank, {}), len(numbers)) for rank in sorted(numbers)}

    @classmethod
    def _of(cls, numbers: dict[str, float], cache: dict[str, str], ranks: int) -> Self:
        """vLLM tells for each rank how many blocks all of them have."""
        blocks = _number(cache.get("num_gpu_blocks")) // ranks
        return cls(numbers, _number(cache.get("block_size")), blocks, cache.get("enable_prefix_caching") != "False")

    @property
    def running(self) -> int:
        return int(self.numbers["num_requests_running"])

    @property
    def waiting(self) -> int:
        return int(self.numbers["num_requests_waiting"])

    def stats(self, before: "Gauges | None") -> SimpleNamespace:
        """In the words of vLLM's core. Since `before` a step took as long as tokens were apart, unless prompts were
        computed meanwhile: how long those take is not told."""
        return SimpleNamespace(
            num_running_reqs=self.running,
            num_waiting_reqs=self.waiting,
            kv_cache_usage=self.numbers["kv_cache_usage_perc"],
            iteration_details=None if before is None else self._details(before),
        )

    def _details(self, before: "Gauges") -> SimpleNamespace | None:
        since = {name: self.numbers[name] - before.numbers[name] for name in NUMBERS}
        tokens = since["inter_token_latency_seconds_count"]
        if tokens <= 0 or not self.running or self.waiting or since["prompt_tokens_total"]:
            return None
        return SimpleNamespace(
            is_dummy=False,
            elapsed_ms=since["inter_token_latency_seconds_sum"] / tokens * 1000,
            num_ctx_requests=0,
            num_ctx_tokens=0,
            num_generation_requests=self.running,
        )


def of_any(ranks: Mapping[int, Gauges]) -> Gauges:
    """Those of one rank, for what is alike in all."""
    return next(iter(ranks.values()), Gauges())


def _samples(page: bytes) -> Iterator[Sample]:
    """Only wanted lines are parsed: a page may have all, which are a thousand."""
    wanted = tuple(f"{PREFIX}{name}{end}".encode() for name in (*NUMBERS, CACHE) for end in ("{", " "))
    lines = b"\n".join(line for line in page.split(b"\n") if line.startswith(wanted))
    for family in text_string_to_metric_families(lines.decode() + "\n"):
        yield from family.samples


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
