"""Rotary position embedding (Su et al., RoFormer), and the ways to scale its frequencies.

Angles are float32. Plain torch computes them from the positions of each step; the kernels read a table.
"""

import math

import torch
from torch import Tensor

from runtime.checkpoint.rope_config import Rope, RopeScaling


class RotaryEmbedding:
    def __init__(self, rope: Rope, device: torch.device) -> None:
        # Always computed on the CPU, because at a position in the thousands the last bit of a frequency counts.
        frequencies = 1.0 / _wavelengths(rope)
        if rope.scaling is not None:
            frequencies = _scaled(frequencies, rope, rope.scaling)
        self._frequencies = frequencies.to(device)  # [dim / 2], radians per position
        self._rope = rope
        self._factor = 1.0 if rope.scaling is None else rope.scaling.attention_factor

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [num_tokens, 1, dim] of [num_tokens] positions, for `rotate`."""
        angles = positions.to(torch.float32)[:, None, None] * self._frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)

    def query_scales(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """[num_tokens, 1, 1], of rotated queries; None: they stay as they are."""
        if not self._rope.query_beta:
            return None
        periods = torch.floor(positions / self._rope.query_period)
        return (1 + self._rope.query_beta * torch.log(1 + periods))[:, None, None].to(dtype)

    def query_scale_table(self, num_positions: int) -> Tensor | None:
        """float32 [num_positions], of rotated queries; None: they stay as they are."""
        scales = self.query_scales(torch.arange(num_positions, device=self._frequencies.device), torch.float32)
        return None if scales is None else scales.flatten()

    def table(self, num_positions: int) -> Tensor:
        """[num_positions, dim] float32: the cosines of a position, then its sines, one per rotated pair."""
        positions = torch.arange(num_positions, dtype=torch.float32, device=self._frequencies.device)
        angles = positions[:, None] * self._frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self._factor


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotates each pair (a, b) = (i, i + dim / 2) of the first `dim` dimensions of [num_tokens, heads, head_dim] by its
    angle: (a cos - b sin, b cos + a sin). Rolling by half the dimension swaps a and b of all pairs at once."""
    dim = cos.shape[-1]
    part = heads[..., :dim]
    rotated = torch.addcmul(part * cos, part.roll(dim // 2, dims=-1), signed_sin)
    return rotated if dim == heads.shape[-1] else torch.cat((rotated, heads[..., dim:]), dim=-1)


def _wavelengths(rope: Rope) -> Tensor:
    """[dim / 2], positions per radian."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    powers: Tensor = rope.theta**exponents
    return powers


def _scaled(frequencies: Tensor, rope: Rope, scaling: RopeScaling) -> Tensor:
    """As RopeScaling tells."""
    match scaling.kind:
        case "linear":
            return frequencies / scaling.factor
        case "longrope":
            return 1.0 / (torch.tensor(scaling.factors) * _wavelengths(rope))
        case "llama3":
            turns = scaling.original_max_position * frequencies / (2 * math.pi)  # = original / wavelength
            kept = (turns - scaling.low) / (scaling.high - scaling.low)
        case _:
            dims = torch.arange(rope.dim // 2, dtype=torch.float32)
            kept = 1.0 - (dims - scaling.low) / max(scaling.high - scaling.low, 0.001)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor
