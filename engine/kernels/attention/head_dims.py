"""Tiles of heads whose size is no power of two: a tile has more dimensions than the head, and masks leave these out.
Where the size is a power of two, no mask is compiled."""

import triton
import triton.language as tl


@triton.jit
def head_dims(HEAD_DIM: tl.constexpr):
    """The dimensions of a tile, from 0 on."""
    return tl.arange(0, triton.next_power_of_2(HEAD_DIM))


@triton.jit
def in_head(dims, HEAD_DIM: tl.constexpr, mask):
    """`mask` without the dimensions beyond a head's. dims: of `head_dims`, along their axis of the tile."""
    if dims.numel > HEAD_DIM:
        mask = mask & (dims < HEAD_DIM)
    return mask


@triton.jit
def load(at, dims, HEAD_DIM: tl.constexpr, mask=None):
    """What lies `at`, and 0 beyond a head's dimensions and outside of the mask."""
    if mask is not None:
        values = tl.load(at, mask=in_head(dims, HEAD_DIM, mask), other=0.0)
    elif dims.numel > HEAD_DIM:
        values = tl.load(at, mask=dims < HEAD_DIM, other=0.0)
    else:
        values = tl.load(at)
    return values
