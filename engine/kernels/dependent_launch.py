"""Programmatic dependent launch (Hopper and newer): a kernel starts while the kernel before it still runs, loads data
that does not depend on that kernel, mostly weights, and then waits for its results.

Invariants of every kernel of the decode step:
- It calls `start_next` at its start. All of its programs are resident before the next kernel's get room, so none can
  starve.
- Each program calls `wait_for_previous`, also one without work, because the end of a kernel must imply the end of all
  before it.
- Before `wait_for_previous` it reads only data that no kernel of the step writes.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def dependent_launch(tensor: Tensor) -> dict[str, bool]:
    """Options of a launch: dependent where the tensor's device supports it; Triton's interpreter does not."""
    overlap = tensor.is_cuda and _is_supported(tensor.device)
    return {"OVERLAP": overlap, "launch_pdl": overlap}


@functools.cache
def _is_supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Lets the next kernel start."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Waits for the results of all kernels before."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    start_next(OVERLAP)
    wait_for_previous(OVERLAP)
