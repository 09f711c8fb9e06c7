"""What the kernels of a layer with experts compute, each alone and all in turn."""

import pytest
import torch

from engine.kernels.experts.choose_experts import choose_experts
from engine.kernels.experts.expert_order import expert_order, unordered
from engine.kernels.experts.expert_sum import expert_sum
from engine.kernels.experts.grouped_linear import LARGE, SILU, SMALL, grouped_linear
from engine.kernels.linear.tile_product import Tiles
from engine.model import experts as reference
from engine.model.experts import ClampedGate, Experts
from tests.engine.kernels.device import DEVICE, DTYPES, TOLERANCE, random, relative_error


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("num_experts", "per_token"), [(6, 2), (128, 8), (4, 4)])
def test_a_token_has_the_experts_of_its_highest_scores(num_experts: int, per_token: int, normed: bool) -> None:
    scores = random(9, num_experts, scale=3)
    weights, chosen = choose_experts(scores, per_token, normed=normed)
    expected, numbers = reference.choose_experts(scores, per_token, normed=normed)
    assert torch.equal(chosen.long(), numbers)
    torch.testing.assert_close(weights, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_scores_that_are_no_numbers_choose_experts_that_exist() -> None:
    """Rows of padding hold anything."""
    _, chosen = choose_experts(torch.full((2, 5), float("nan"), device=DEVICE), 3, normed=True)
    assert 0 <= chosen.min() <= chosen.max() < 5


@pytest.mark.parametrize(("tokens", "num_experts", "per_token"), [(1, 5, 2), (700, 3, 2), (40, 128, 8)])
def test_pairs_are_in_the_order_of_the_experts(tokens: int, num_experts: int, per_token: int) -> None:
    chosen = torch.stack([torch.randperm(num_experts)[:per_token] for _ in range(tokens)]).int().to(DEVICE)
    order = expert_order(chosen, num_experts)
    flat = chosen.flatten()
    assert torch.equal(order.pairs.long(), torch.sort(flat, stable=True).indices)
    counts = torch.bincount(flat, minlength=num_experts)
    assert order.first is not None
    assert torch.equal(order.first.long(), torch.cat((counts.new_zeros(1), counts.cumsum(0))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamped", [False, True], ids=["silu", "clamped"])
@pytest.mark.parametrize(
    "tiles",
    [SMALL.few, LARGE.several, SMALL.some, LARGE.some, LARGE.many],
    ids=lambda tiles: f"{tiles.rows}x{tiles.columns}x{tiles.inner}",
)
@pytest.mark.parametrize(("tokens", "hidden", "width"), [(2, 64, 32), (90, 80, 72)])
def test_experts_compute_what_one_after_the_other_computes(
    dtype: torch.dtype,
    clamped: bool,
    tiles: Tiles,
    tokens: int,
    hidden: int,
    width: int,
) -> None:
    """Some experts have no token, others more than a tile has rows."""
    count, per_token = 9, 3
    gates_ups = random(count, 2 * width, hidden, scale=hidden**-0.5)
    downs = random(count, hidden, width, scale=width**-0.5)
    gate = None
    down_biases = random(count, hidden).to(dtype) if clamped else None
    if clamped:  # as gpt-oss has its weights, [experts, in, out]
        gates_ups, downs = (values.mT.contiguous().mT for values in (gates_ups, downs))
        gate = ClampedGate(random(count, 2 * width).to(dtype), 1.702, 1.5)
    layer = Experts(gates_ups.to(dtype), downs.to(dtype), gate, down_biases)
    x, scores = random(tokens, hidden, dtype=dtype), random(tokens, count)
    scores[:, 4:7] -= 100.0
    scores[:, 0] += 3.0
    chosen = choose_experts(scores, per_token, normed=True)
    wide = Experts(
        layer.gates_ups.double(),
        layer.downs.double(),
        gate and ClampedGate(gate.biases.double(), 1.702, 1.5),
        down_biases if down_biases is None else down_biases.double(),
    )
    expected = reference.run_experts(x.double(), chosen, wide)
    own = None if dtype == torch.float32 else tiles
    biases = None if gate is None else gate.biases
    for order in [expert_order(chosen.numbers, count), *([unordered(chosen.numbers)] if tokens == 2 else [])]:
        activations = grouped_linear(
            x, layer.gates_ups, order, pairs_per_row=per_token, biases=biases, gate=gate or SILU, tiles=own
        )
        outputs = grouped_linear(activations, layer.downs, order, biases=down_biases, tiles=own)
        assert relative_error(expert_sum(outputs, chosen.weights), expected) < TOLERANCE[dtype]
    before = random(tokens, hidden, dtype=dtype)
    found = expert_sum(outputs, chosen.weights, before.clone(), add=True)
    assert relative_error(found, before + expected) < TOLERANCE[dtype]
