"""Rotary position embedding (Su et al., RoFormer), and Llama 3.1's scaling of its frequencies.

Angles are float32. Plain torch computes them from the positions of each step; the kernels read a table.
"""

import math

import torch
from torch import Tensor

from runtime.checkpoint.model_config import Llama3RopeScaling, ModelConfig


class RotaryEmbedding:
    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        # Always computed on the CPU, because at a position in the thousands the last bit of a frequency counts.
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        frequencies = 1.0 / config.rope_theta**exponents
        if config.rope_scaling is not None:
            frequencies = _llama3_scaled(frequencies, config.rope_scaling)
        self._frequencies = frequencies.to(device)  # [head_dim / 2], radians per position

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [num_tokens, 1, head_dim] of [num_tokens] positions, for `rotate`."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)

    def table(self, num_positions: int) -> Tensor:
        """[num_positions, head_dim] float32: the cosines of a position, then its sines, one per rotated pair."""
        positions = torch.arange(num_positions, dtype=torch.float32, device=self._frequencies.device)
        angles = positions[:, None] * self._frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates each pair (a, b) = (i, i + head_dim / 2) of [num_tokens, heads, head_dim] by its angle: (a cos - b sin,
    b cos + a sin). Rolling by half the dimension swaps a and b of all pairs at once."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), signed_sin)


def _llama3_scaled(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Stretches wavelengths above original / low_freq_factor by `factor`, keeps those below original /
    high_freq_factor, and blends between them linearly in original / wavelength."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # = original / wavelength
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor
