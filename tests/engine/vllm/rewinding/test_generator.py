"""A seeded request's random stream does not depend on the tokens that were drawn and discarded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.vllm.rewinding.generator import RewindingGenerator, marking

SEED = 7


class Sampler:
    """Draws as vLLM's does, from each request's generator."""

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *, width: int = 1) -> list[list[float]]:
        generators = sampling_metadata.generators.values()
        return [torch.rand(width, generator=one).tolist() for one in generators]

    marked = marking(forward)


def draw(*generators: torch.Generator, width: int = 1) -> Any:
    metadata = SimpleNamespace(generators=dict(enumerate(generators)))
    return Sampler().marked(torch.empty(0), sampling_metadata=metadata, width=width)


def seeded() -> RewindingGenerator:
    generator = RewindingGenerator(device="cpu")
    generator.manual_seed(SEED)
    return generator


def discard(generator: torch.Generator) -> None:
    """As vLLM does it."""
    generator.set_offset(generator.get_offset() - 4)


@pytest.mark.parametrize("width", [1, 1000])
def test_discarded_draws_leave_the_stream_as_it_was(width: int) -> None:
    """Those of a prompt's steps, and those of the steps in which a preempted request is computed again."""
    plain, other = seeded(), seeded()
    expected = [draw(plain, width=width) for _ in range(4)]
    got = []
    for _ in range(4):
        for _ in range(3):
            draw(other, width=width)
            discard(other)
        got.append(draw(other, width=width))
    assert got == expected


def test_a_discarded_draw_of_one_request_moves_no_other_ones_stream() -> None:
    one, other, plain = seeded(), seeded(), seeded()
    draw(one, other)
    discard(one)
    assert draw(one, other) == [*draw(plain), *draw(plain)]


def test_a_draw_is_taken_back_once() -> None:
    plain, one = seeded(), seeded()
    expected = [draw(plain), draw(plain)]
    draw(one)
    discard(one)
    draw(one)
    kept = draw(one)
    assert kept == expected[1]
    discard(one)
    discard(one)
    assert draw(one) == expected[1]


def test_a_stream_that_was_never_drawn_from_stays() -> None:
    one = seeded()
    discard(one)
    assert draw(one) == draw(seeded())


def test_torchs_own_generator_is_left_alone() -> None:
    """vLLM's own, such as that of requests without a seed."""
    own = torch.Generator().manual_seed(SEED)
    assert draw(own) == draw(seeded())


def test_torch_has_no_offset_on_cpus() -> None:
    """When this fails, the module is superfluous."""
    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator().get_offset()
