"""Launches kernels without Triton's search for the compiled kernel, which takes 20 of a launch's 30 us on the host.

A step that is not a CUDA graph launches some 280 kernels, so with few tokens the GPU waits for the host. Where a
model's layers launch the same kernels, all but the first layer's can do without looking at their arguments again.
Invariant: a process uses one GPU.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from triton.runtime import JITFunction

Launch = tuple[Any, tuple[int, ...], list[Any]]
"""(compiled kernel, grid, arguments)"""


class _Noting(threading.local):
    launches: list[Launch] | None = None


_noting = _Noting()


class NotedLaunches:
    """Launches of this thread under `with`, of which there is one: they can be made again."""

    def __init__(self) -> None:
        self._launches: list[Launch] = []

    def __enter__(self) -> None:
        _noting.launches = self._launches

    def __exit__(self, *_: object) -> None:
        _noting.launches = None

    def again(self, others: Mapping[int, int]) -> bool:
        """Makes them again, with other addresses in the place of some. Invariant: those are aligned as these are.
        False: none is noted, as in Triton's interpreter."""
        for compiled, grid, values in self._launches:
            compiled[grid](*[others.get(value, value) for value in values])
        return bool(self._launches)


class QuickLaunch:
    """Decorates a Triton kernel, which is launched as before. Arguments that vary are given by position; constants and
    options by name, always in the same order. In Triton's interpreter the kernel stays as it is."""

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
        whole_grid = (*grid, 1, 1)[:3]
        if compiled is None:
            compiled = self._kernel[grid](*arguments, **constants)
            trailing = [constants[name] for name in self._kernel.arg_names if name in constants]
            self._compiled[tuple(key)] = (compiled, trailing)
        else:
            compiled[whole_grid](*values, *trailing)
        if _noting.launches is not None:
            _noting.launches.append((compiled, whole_grid, values + trailing))
        return compiled


def _kind(value: float) -> int:
    """The kind of a number that Triton compiles for: 1, multiples of 16, and numbers of 64 bits are kinds apart."""
    if isinstance(value, float) or not -(2**31) <= value < 2**31:
        return 3 if isinstance(value, float) else 4 + (value % 16 == 0)
    return 2 if value == 1 else int(value % 16 == 0)
