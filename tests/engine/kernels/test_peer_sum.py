"""Sums over memory that processes share. On GPUs: tests/engine/ranks/test_tensor_parallel_gpu.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.kernels.summing_rank import segments_bytes

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU"),
]


def test_every_rank_gets_the_sum_whoever_is_ahead(tmp_path: Path) -> None:
    ranks = 4
    segments = [tmp_path / str(rank) for rank in range(ranks)]
    for segment in segments:
        segment.write_bytes(bytes(segments_bytes(ranks)))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "TRITON_INTERPRET": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.engine.kernels.summing_rank", str(rank), *map(str, segments)],
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=110)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(errors)
