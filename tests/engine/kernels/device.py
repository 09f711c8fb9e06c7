"""Where kernel tests run, and how exact their results have to be."""

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter truncates to bfloat16
DTYPES = [torch.float32, HALF]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
F8_ERROR = 0.04 if DEVICE.type == "cuda" else 0.12  # the interpreter halves what is rounded up to a power of two


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def edged(values: Tensor) -> Tensor:
    """The values, with NaN right behind them in memory: whoever reads too far shows it."""
    room = torch.full((values.numel() + 256,), float("nan"), dtype=values.dtype, device=values.device)
    room[: values.numel()] = values.flatten()
    return room[: values.numel()].view(values.shape)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """NaN when anything is NaN, which no comparison lets pass."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())
