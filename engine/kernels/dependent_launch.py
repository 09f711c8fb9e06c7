"""Programmatic dependent launch (Hopper and newer): a kernel starts while the one before it still runs, loads what does
not depend on it, mostly weights, and then waits for its results.

Every kernel of the decode step follows three rules. It calls `gdc_launch_dependents` at its start: its own programs are
all resident by the time that the next kernel's get room, so nothing can starve. Each of its programs calls `gdc_wait`,
also one that has nothing to do: the end of a kernel must imply the end of all before it. And before `gdc_wait` it reads
only what no kernel of the step writes.
"""

import functools

import torch
from torch import Tensor


def dependent_launch(tensor: Tensor) -> bool:
    """Whether kernels on that tensor's device can be launched so. In Triton's interpreter they cannot."""
    return tensor.is_cuda and _is_supported(tensor.device)


@functools.cache
def _is_supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
