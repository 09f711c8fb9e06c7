"""Launches kernels without Triton's search for the compiled one, which takes the host 20 of 30 us, each time.

A step that is not a CUDA graph launches some 280 kernels, so with few tokens it is the host that it waits for. One GPU
per process.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from triton.runtime import JITFunction


class QuickLaunch:
    """Decorates a Triton kernel, which is then launched as before. Arguments that vary are given by position, constants
    and options by name, in one order. In Triton's interpreter nothing changes."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return partial(self._launch, grid) if isinstance(self._kernel, JITFunction) else self._kernel[grid]

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> Any:
        values, key = [], list(constants.values())
        for argument in arguments:
            if isinstance(argument, Tensor):
                address = argument.data_ptr()
                values.append(address)
                key += (argument.dtype, address % 16 == 0)
            else:
                values.append(argument)
                key.append(_kind(argument))
        compiled, trailing = self._compiled.get(tuple(key), (None, []))
        if compiled is None:
            compiled = self._kernel[grid](*arguments, **constants)
            trailing = [constants[name] for name in self._kernel.arg_names if name in constants]
            self._compiled[tuple(key)] = (compiled, trailing)
        else:
            compiled[(*grid, 1, 1)[:3]](*values, *trailing)
        return compiled


def _kind(value: float) -> int:
    """What Triton compiles for of a number: 1, multiples of 16 and what needs 64 bits are apart."""
    if isinstance(value, float) or not -(2**31) <= value < 2**31:
        return 3 if isinstance(value, float) else 4 + (value % 16 == 0)
    return 2 if value == 1 else int(value % 16 == 0)
