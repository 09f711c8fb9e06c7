"""A flag by which a stream of one GPU tells a stream of another that all before it has been done.

The flag lies in the memory of who waits; who sets it has it mapped.
"""

import triton
import triton.language as tl
from torch import Tensor

from runtime.device.quick_launch import QuickLaunch

FOREVER = 2**31 - 1  # turns of a wait, each about a microsecond


def set_flag(flag: Tensor, value: int) -> None:
    """flag: int32 [1], of a peer. Enqueued on the current stream: set when all before it in the stream has ended."""
    _set[(1,)](flag, value, num_warps=1)


def wait_for_flag(flag: Tensor, value: int, max_turns: int = FOREVER) -> None:
    """flag: int32 [1], ours. What follows in the current stream waits until it is `value`, or for so many turns."""
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
