"""Ranks on GPUs of their own, over NCCL and over the peers' memory: the tokens of one GPU, and a lost rank's end."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

from baton_proto.sampling import SamplingParams
from engine.model.shard import shard_of
from engine.parallel.peer_memory import SWITCH
from engine.sequences.sequence import Sequence
from runtime.checkpoint.model_files import ModelFiles, resolve_model
from runtime.config.serving import EngineConfig
from tests.engine.engine_runs import run, sequences, small_engine
from tests.spine.prompts import random_prompt
from tests.tiny_model import write_tiny_model

NUM_BLOCKS = 40
PARAMS = [
    *(SamplingParams(max_tokens=20, seed=seed, temperature=0.0, ignore_eos=True) for seed in range(4)),
    SamplingParams(max_tokens=20, seed=5, temperature=0.8, ignore_eos=True),
    SamplingParams(max_tokens=20, seed=6, temperature=0.8, top_p=0.9, ignore_eos=True),
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.fixture(scope="module", params=["llama", "qwen3", "two_kv_heads"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    kv_heads = 2 if request.param == "two_kv_heads" else 8
    folder = write_tiny_model(
        tmp_path_factory.mktemp(request.param),
        architecture="qwen3" if request.param == "qwen3" else "llama",
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=request.param == "qwen3",
    )
    return resolve_model(str(folder))


def config(size: int, max_batch_tokens: int = 64, max_model_len: int = 512) -> EngineConfig:
    return EngineConfig(
        device="cuda",
        dtype="float32",
        attention="triton",
        kv_memory="64MiB",
        max_batch_tokens=max_batch_tokens,
        max_running=8,
        max_model_len=max_model_len,
        tensor_parallel=size,
    )


def prepare(size: int, sums: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For ranks on so many GPUs, whose sums go through the peers' memory or are left to NCCL."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    if sums == "nccl":
        monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture(scope="module")
def expected(files: ModelFiles) -> tuple[dict[str, list[int]], torch.Tensor]:
    """Answers and KV of one GPU."""
    from engine.loading.loaded_model import load_model

    model = load_model(files, config(1))
    answers = run(small_engine(files, model.runner, NUM_BLOCKS, 64, 8), sequences(PARAMS, seed=1))
    slab = model.slab.tensor[:, 1:NUM_BLOCKS].cpu()  # the first one holds what warm-up left
    model.close()
    return answers, slab


@pytest.mark.parametrize("sums", ["peers", "nccl"])
@pytest.mark.parametrize("size", [2, 4])
def test_tokens_and_kv_are_those_of_one_gpu(
    files: ModelFiles,
    expected: tuple[dict[str, list[int]], torch.Tensor],
    size: int,
    sums: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy, drawn on the device and on the host; prompts launched, decodes replayed."""
    from engine.ranks.tensor_parallel import load_tensor_parallel

    prepare(size, sums, monkeypatch)
    lost: list[Exception] = []
    model = load_tensor_parallel(files, config(size), lost.append)
    try:
        operations: Any = model.own.runner._model.operations  # type: ignore[attr-defined]
        assert (operations._few_rows is not None) == (sums == "peers"), "this machine's GPUs can read each other"
        answers, whole = expected
        assert run(small_engine(files, model.runner, NUM_BLOCKS, 64, 8), sequences(PARAMS, seed=1)) == answers
        heads = shard_of(files.config, 0, size).kv_heads
        own = model.slab.tensor[:, 1:NUM_BLOCKS].cpu()  # the first one holds what warm-up left
        torch.testing.assert_close(own, whole[:, :, heads.start : heads.stop], rtol=1e-3, atol=1e-3)
        assert not lost
    finally:
        model.close()


@pytest.mark.parametrize("sums", ["peers", "nccl"])
@pytest.mark.parametrize("size", [2, 4])
def test_long_prompts_whose_rows_travel_in_pieces_are_answered_as_by_one_gpu(
    files: ModelFiles, size: int, sums: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.loading.loaded_model import load_model
    from engine.parallel.peer_push import PeerPush
    from engine.ranks.tensor_parallel import load_tensor_parallel

    prepare(size, sums, monkeypatch)

    def answers(model: Any) -> dict[str, list[int]]:
        try:
            work = []
            for index, length in enumerate((700, 2048, 3900, 1024, 2500, 37, 3000)):
                sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
                prompt = random_prompt(length, seed=length)
                work.append(Sequence(f"r{index}", prompt, length, sampling))
            return run(small_engine(files, model.runner, 1000, 8192, 8), work)
        finally:
            model.close()

    lost: list[Exception] = []
    expected = answers(load_model(files, config(1, 8192, 4096)))
    model = load_tensor_parallel(files, config(size, 8192, 4096), lost.append)
    operations: Any = model.own.runner._model.operations  # type: ignore[attr-defined]
    pushes = isinstance(operations._many_rows, PeerPush)
    assert pushes == (sums == "peers" and size == 2), "this machine's GPUs can write each other's memory"
    assert answers(model) == expected
    assert not lost


KILLED = """
import os, signal, sys, time
from tests.engine.engine_runs import sequences, small_engine
from tests.engine.ranks.test_tensor_parallel_gpu import PARAMS, config
from runtime.checkpoint.model_files import resolve_model
from engine.ranks.tensor_parallel import load_tensor_parallel

files = resolve_model(sys.argv[1])
model = load_tensor_parallel(files, config(2))
engine = small_engine(files, model.runner, 40, 64, 8)
for sequence in sequences(PARAMS, seed=1):
    engine.add(sequence)
for _ in range(6):
    engine.step()
print("pid", model.ranks.pids[0], time.time(), flush=True)
os.kill(model.ranks.pids[0], signal.SIGKILL)
while True:
    engine.step()
"""


def test_a_killed_rank_ends_the_process_even_while_the_gpu_waits_for_it(files: ModelFiles) -> None:
    import time

    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(files.folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    ended_s = time.time()
    _, pid, killed_s = next(line for line in process.stdout.splitlines() if line.startswith("pid ")).split()
    assert f"tensor-parallel rank 1 (pid {pid}) was ended by {signal.SIGKILL.name}" in process.stderr
    assert process.returncode == 1
    assert ended_s - float(killed_s) < 10, "the watcher needs no second; the driver takes its time to clean up"
