"""A flag with which a stream of one GPU tells a stream of another GPU that all work before the flag has ended.

The flag lies in the memory of the GPU that waits; the setter has it mapped.
"""

import triton
import triton.language as tl
from torch import Tensor

from runtime.device.quick_launch import QuickLaunch

FOREVER = 2**31 - 1  # turns of a wait, about 1 us each


def set_flag(flag: Tensor, value: int) -> None:
    """flag: int32 [1], in a peer's memory. Sets the flag once all earlier work of the current stream has ended."""
    _set[(1,)](flag, value, num_warps=1)


def wait_for_flag(flag: Tensor, value: int, max_turns: int = FOREVER) -> None:
    """flag: int32 [1], in own memory. Later work of the current stream waits until the flag is `value`, for at most
    `max_turns` turns."""
    _wait[(1,)](flag, value, max_turns, num_warps=1)


@QuickLaunch
@triton.jit(do_not_specialize=["value"])
def _set(flag, value):
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


@QuickLaunch
@triton.jit(do_not_specialize=["value", "max_turns"])
def _wait(flag, value, max_turns):
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    turns = 0
    while (seen != value) & (turns < max_turns):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        turns += 1
