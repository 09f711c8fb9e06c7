"""Random streams of seeded requests on CPUs: vLLM takes back what it drew for a token that nobody gets.

A prompt that is computed in several steps draws a token in each of them, and all but the last are discarded. For each,
vLLM winds the request's generator back by an offset, which torch's generators have on GPUs alone: on a CPU they raise,
and vLLM 0.32 ends.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


class RewindingGenerator(torch.Generator):
    """A CPU generator whose offset is always 0. Setting a lower one takes the last draw back."""

    _before: torch.Tensor | None = None

    def mark(self) -> None:
        """A draw comes next."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Invariant: a draw is taken back once."""
        if offset < 0 and self._before is not None:
            self.set_state(self._before)
            self._before = None
        return self


def marking(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A sampler's `forward` that marks the generators of its batch first."""

    @functools.wraps(forward)
    def marked(sampler: Any, logits: torch.Tensor, sampling_metadata: Any, *others: Any, **options: Any) -> Any:
        for generator in sampling_metadata.generators.values():
            if isinstance(generator, RewindingGenerator):
                generator.mark()
        return forward(sampler, logits, sampling_metadata, *others, **options)

    return marked
