"""What a vLLM server's /metrics say of its load, of its cache, and of how long its steps take."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Final, Self

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


@dataclass(frozen=True, slots=True)
class Gauges:
    """Sums since the server's start, but for the first three numbers."""

    numbers: dict[str, float] = field(default_factory=dict)
    block_size: int = 0  # 0: not told
    num_blocks: int = 0
    caches: bool = True  # prefixes are kept
    engines: int = 0  # of the server: more than one with --data-parallel-size

    @classmethod
    def read(cls, page: bytes) -> Self:
        """Raises ValueError."""
        numbers = dict.fromkeys(NUMBERS, 0.0)
        cache: dict[str, str] = {}
        engines = 0
        for sample in _samples(page):
            name = sample.name.removeprefix(PREFIX)
            if name == CACHE:
                cache = sample.labels
            else:
                numbers[name] += sample.value
                engines += name == "kv_cache_usage_perc"
        block_size, num_blocks = _number(cache.get("block_size")), _number(cache.get("num_gpu_blocks"))
        return cls(numbers, block_size, num_blocks, cache.get("enable_prefix_caching") != "False", engines)

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


def _samples(page: bytes) -> Iterator[Sample]:
    """Only wanted lines are parsed: the page has a thousand."""
    wanted = tuple(f"{PREFIX}{name}{end}".encode() for name in (*NUMBERS, CACHE) for end in ("{", " "))
    lines = b"\n".join(line for line in page.split(b"\n") if line.startswith(wanted))
    for family in text_string_to_metric_families(lines.decode() + "\n"):
        yield from family.samples


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
