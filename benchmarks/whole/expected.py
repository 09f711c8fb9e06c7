"""What `baton advise` expects of a run: the one place that knows the advisor here."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from baton.bench.workload import TRACE_BLOCK, TraceLine
from baton.cli.advice.inputs import Workers
from benchmarks.whole.figures import Cell
from benchmarks.whole.servers import System
from router.placement.weights import Weights
from runtime.errors import ConfigError
from simulator.advice.comparison import Comparison
from simulator.advice.traffic import TraceTraffic

EXPECTED = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")


class Advisor:
    def __init__(self, profile: Path | None, kv_tokens: int) -> None:
        """`profile`: of `baton profile --out`, or a serving.yaml; None: the mock engine's steps. `kv_tokens`: of one
        GPU. Raises ConfigError."""
        self._workers = Workers([profile] if profile else [], None if profile else "mock", kv_tokens)

    def expected(self, system: System, cell: Cell, lines: Sequence[TraceLine]) -> dict[str, float]:
        """The figures EXPECTED in ms. Raises ConfigError when the advisor considers no such layout."""
        gpus = system.prefill + system.decode
        mixed, splits = self._workers.layouts(gpus)
        found = [
            layout
            for layout in (splits if system.prefill else mixed)
            if (layout.prefill, layout.decode) == (system.prefill, system.decode)
            and system.max_batch_tokens in (None, layout.decode_kind.max_batch_tokens)
        ]
        if not found:
            raise ConfigError("--advise", f"the advisor considers no layout {system.name} of {gpus} GPUs")
        arrival_s, prompt, output = (
            np.array([getattr(line, name) for line in lines]) for name in ("timestamp", "input_length", "output_length")
        )
        coming = TraceTraffic(
            arrival_s / 1e3,
            prompt,
            np.maximum(1, output),
            hash_ids=[line.hash_ids for line in lines],
            block_tokens=TRACE_BLOCK,
        )
        config = self._workers.config
        comparison = Comparison(coming, config.planner.targets, Weights.of(config.router.placement), gpus, 1)
        score = comparison.score(found[0], cell[1], seed=0)
        return dict(
            zip(EXPECTED, (score.ttft_p50_ms, score.ttft_p99_ms, score.itl_p50_ms, score.itl_p99_ms), strict=True)
        )
