"""A step's indices and tokens, between the device and pinned memory, by a kernel.

Because a copy engine serves one direction in order, a copy of a few bytes may wait for all that the host tier has asked
it for: 88 ms behind a prefix of 32k tokens of an 8B model (H200). The kernel waits for none of it.
"""

import triton
import triton.language as tl
from torch import Tensor

from runtime.device.quick_launch import QuickLaunch

_BLOCK = 1024


def copy_words(source: Tensor, target: Tensor) -> None:
    """Copies int32 [count] between device and pinned memory. The target holds the words once the current stream's work
    so far has ended."""
    count = len(source)
    _copy[(triton.cdiv(count, _BLOCK),)](source, target, count, BLOCK=_BLOCK, num_warps=4)


@QuickLaunch
@triton.jit(do_not_specialize=["count"])
def _copy(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)
