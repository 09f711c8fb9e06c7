"""The masks of a step's sequences with grammars, on their way to the GPU."""

from collections.abc import Iterable

import torch
from torch import Tensor

from engine.cuda.step_inputs import aligned
from engine.kernels.sampling import MaskedRows
from engine.runners.sampler import fill_rows
from engine.sequences.sequence import Sequence


class MaskBuffer:
    """Row numbers, then masks, in one copy. Invariant: a step's masks are filled when the tokens of the step before are
    known, so nothing on the device reads the masks before them."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_words = -(-vocab_size // 32)
        size = aligned(max_rows) + max_rows * self._num_words
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)

    def fill(self, rows: list[int], sequences: Iterable[Sequence]) -> None:
        """Computes the masks of sampled rows, for `upload`."""
        masked = self._view(self._host, len(rows))
        masked.rows.copy_(torch.tensor(rows, dtype=torch.int32))
        fill_rows(sequences, masked.words.numpy())

    def upload(self, count: int) -> Tensor:
        """Copies what was filled to the device, in stream order. Returns the words, which other ranks `receive`."""
        words = self.received(count)
        words.copy_(self._host[: len(words)], non_blocking=True)
        return words

    def received(self, count: int) -> Tensor:
        """Where the device has the words of as many rows."""
        return self._device[: aligned(count) + count * self._num_words]

    def rows(self, count: int) -> MaskedRows:
        return self._view(self._device, count)

    def _view(self, words: Tensor, count: int) -> MaskedRows:
        begin = aligned(count)
        return MaskedRows(words[:count], words[begin : begin + count * self._num_words].view(count, self._num_words))
