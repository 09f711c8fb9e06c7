"""The torch attention against a dense float64 oracle, on slabs whose unused slots hold large values."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.model.attention import LayerAttention, Span, StepAttention
from engine.runners.torch_attention import TorchAttention
from kvtransfer.slab.layout import SlabLayout

HEADS, KV_HEADS, HEAD_DIM, NUM_BLOCKS = 6, 2, 16, 64
POISON = 1e4


@dataclass
class Dense:
    """A sequence as the oracle sees it: all keys and values so far, in order."""

    block_table: list[int]
    keys: list[Tensor] = field(default_factory=list)  # [kv_heads, head_dim] each
    values: list[Tensor] = field(default_factory=list)

    def attend(self, queries: Tensor) -> Tensor:
        """[n, heads, head_dim] of the last n tokens."""
        keys, values = torch.stack(self.keys).double(), torch.stack(self.values).double()
        group, outputs = HEADS // KV_HEADS, []
        for index, query in enumerate(queries.double()):
            visible = len(self.keys) - len(queries) + index + 1
            k = keys[:visible].repeat_interleave(group, dim=1)
            v = values[:visible].repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,thd->ht", query, k) / HEAD_DIM**0.5
            outputs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v))
        return torch.stack(outputs)


class StandingStill:
    """A rotary embedding that leaves heads as they are; rotation has its own tests."""

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.ones(len(positions), 1, HEAD_DIM), torch.zeros(len(positions), 1, HEAD_DIM)

    def query_scales(self, positions: Tensor, dtype: torch.dtype) -> None:
        """Queries stay as they are, too."""


class Bench:
    """A slab, the attention under test and the oracle, fed with the same random tokens."""

    def __init__(self, block_size: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        layout = SlabLayout(2, NUM_BLOCKS, KV_HEADS, block_size, HEAD_DIM, "float32")
        self.block_size = block_size
        self.slab = torch.full(layout.shape, POISON)
        self.attention = TorchAttention(layout, StandingStill(), torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
        self.free = self.random.permutation(NUM_BLOCKS).tolist()

    def sequence(self, max_tokens: int) -> Dense:
        return Dense([self.free.pop() for _ in range(-(-max_tokens // self.block_size))])

    @torch.inference_mode()
    def step(self, prefill: list[tuple[Dense, int]], decode: list[Dense]) -> None:
        """Runs the next tokens of the sequences through both layers and compares."""
        work = [*prefill, *((sequence, 1) for sequence in decode)]
        spans = [Span(len(s.keys), len(s.keys) + count, s.block_table) for s, count in work]
        total = sum(count for _, count in work)
        metadata = self.attention.prepare(spans[: len(prefill)], spans[len(prefill) :])
        done: list[int] = []
        step = StepAttention(
            [LayerAttention(self.attention, metadata)] * 2, self.slab, total - len(decode), done.append
        )
        queries = torch.randn(total, HEADS, HEAD_DIM)
        keys, values = torch.randn(total, KV_HEADS, HEAD_DIM), torch.randn(total, KV_HEADS, HEAD_DIM)
        result = step(1, torch.cat((queries, keys, values), dim=1), None)
        assert done == [1]
        at = 0
        for sequence, count in work:
            sequence.keys += keys[at : at + count].unbind()
            sequence.values += values[at : at + count].unbind()
            torch.testing.assert_close(
                result[at : at + count].double(), sequence.attend(queries[at : at + count]), rtol=1e-5, atol=1e-5
            )
            at += count


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("seed", range(3))
def test_mixed_steps_of_chunks_and_decodes_equal_dense_attention(block_size: int, seed: int) -> None:
    bench = Bench(block_size, seed)
    sequences = [bench.sequence(200) for _ in range(4)]
    fresh, running = list(sequences), []
    for _ in range(8):
        prefill = [(s, int(bench.random.integers(1, 50))) for s in fresh if bench.random.random() < 0.7]
        decode = [s for s in running if bench.random.random() < 0.8]
        if prefill or decode:
            bench.step(prefill, decode)
        for sequence, _ in prefill:
            if bench.random.random() < 0.5:  # its prompt is done
                fresh = [s for s in fresh if s is not sequence]
                running.append(sequence)
    assert running


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_a_prompt_and_the_token_after_it_cross_block_borders(length: int) -> None:
    bench = Bench(16, seed=length)
    sequence = bench.sequence(length + 1)
    bench.step([(sequence, length)], [])
    bench.step([], [sequence])


def test_decodes_of_very_different_lengths_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runners.torch_attention.GATHER_BYTES", 8 * KV_HEADS * 2 * 16 * HEAD_DIM * 4)  # 8 blocks
    bench = Bench(16, seed=7)
    sequences = [bench.sequence(length + 2) for length in (1, 100, 3, 16, 200, 31)]  # 200 alone is above the limit
    for sequence, length in zip(sequences, (1, 100, 3, 16, 200, 31), strict=True):
        bench.step([(sequence, length)], [])
    bench.step([], sequences)
    bench.step([], sequences[::-1])


def test_store_writes_the_tokens_slots_and_nothing_else() -> None:
    bench = Bench(16, seed=3)
    sequence = bench.sequence(40)
    bench.step([(sequence, 21)], [])
    expected = torch.full_like(bench.slab, POISON)
    for position, (key, value) in enumerate(zip(sequence.keys, sequence.values, strict=True)):
        block, offset = sequence.block_table[position // 16], position % 16
        expected[1, block, :, 0, offset] = key
        expected[1, block, :, 1, offset] = value
    assert torch.equal(bench.slab, expected)
