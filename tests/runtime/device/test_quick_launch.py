"""Launches that are noted and made again, with stand-ins for Triton's compiled kernels: it counts what they get."""

import threading

import torch

from runtime.device.quick_launch import NotedLaunches, QuickLaunch
from tests.runtime.device.stand_ins import Kernel


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
