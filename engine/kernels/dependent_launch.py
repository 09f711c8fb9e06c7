"""Programmatic dependent launch (Hopper and newer): a kernel starts while the kernel before it still runs, loads data
that does not depend on that kernel, mostly weights, and then waits for its results.

Invariants of every kernel of the decode step:
- It calls `gdc_launch_dependents` at its start. All of its programs are resident before the next kernel's get room, so
  none can starve.
- Each program calls `gdc_wait`, also one without work, because the end of a kernel must imply the end of all before it.
- Before `gdc_wait` it reads only data that no kernel of the step writes.
"""

import functools

import torch
from torch import Tensor


def dependent_launch(tensor: Tensor) -> bool:
    """Whether the tensor's device supports dependent launches; Triton's interpreter does not."""
    return tensor.is_cuda and _is_supported(tensor.device)


@functools.cache
def _is_supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
