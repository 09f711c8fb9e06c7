"""Launches that are noted and made again, with stand-ins for Triton's compiled kernels: it counts what they get."""

import threading
from typing import Any

import torch
from triton.runtime import JITFunction

from runtime.device.quick_launch import NotedLaunches, QuickLaunch


class Compiled:
    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launches.append((grid, arguments))


class Kernel(JITFunction):  # type: ignore[misc]
    """Compiles at its first launch, as Triton does, and takes `SIZE` as a constant."""

    def __init__(self) -> None:
        self.compiled = Compiled()
        self.first: list[Any] = []

    @property
    def arg_names(self) -> list[str]:
        return ["source", "target", "count", "SIZE"]

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.first.append((grid, arguments, constants))
            return self.compiled

        return launch


def test_noted_launches_are_made_again_with_other_addresses_in_place() -> None:
    kernel = Kernel()
    launch = QuickLaunch(kernel)
    source, target, other = torch.zeros(64), torch.zeros(64), torch.zeros(64)
    noted = NotedLaunches()
    with noted:
        launch[(7,)](source, target, 64, SIZE=16)  # compiles
        launch[(7, 2)](target, source, 64, SIZE=16)
    launch[(1,)](source, target, 64, SIZE=16)  # nobody notes it
    assert len(kernel.first) == 1
    kernel.compiled.launches.clear()
    assert noted.again({target.data_ptr(): other.data_ptr()})
    assert kernel.compiled.launches == [
        ((7, 1, 1), (source.data_ptr(), other.data_ptr(), 64, 16)),
        ((7, 2, 1), (other.data_ptr(), source.data_ptr(), 64, 16)),
    ]


def test_launches_of_another_thread_are_not_noted() -> None:
    launch, tensor, noted = QuickLaunch(Kernel()), torch.zeros(64), NotedLaunches()
    with noted:
        other = threading.Thread(target=lambda: launch[(1,)](tensor, tensor, 1, SIZE=1))
        other.start()
        other.join()
    assert not noted.again({})
