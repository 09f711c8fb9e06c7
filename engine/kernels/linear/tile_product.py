"""One tile of a product of rows with weights: its sizes, and the loop in which a program computes it.

Hopper's tensor cores want 64 numbers on the left side of a product. Few rows are fewer, weights are not: a tile that is
turned has weights on the left.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Tiles(NamedTuple):
    rows: int
    columns: int  # of the product, before activations make one of a gate and an up
    inner: int  # at most
    num_warps: int
    num_stages: int
    turned: bool = False  # weights on the left side of the product


@triton.jit
def tile_product(
    at_x, at_weights, at_scales, is_x, is_weight, inner, deep, stride, begin, DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[rows of x, rows of weights], float32: x @ weights.T over DEPTH numbers of each row.

    at_x, at_weights, at_scales: where rows begin. is_x, is_weight: whether there is such a row. inner, deep: BLOCK_K
    numbers of a row of x and of weights, whose distance is `stride`. GROUP: numbers that share a scale; 0: no scale is
    applied. begin: number of a row's first weight. EVEN: tiles have no more weights than there are.
    """
    if TURNED:
        left, right = at_weights[:, None] + deep[None, :], at_x[None, :] + inner[:, None]
        is_left, is_right = is_weight[:, None], is_x[None, :]
    else:
        left, right = at_x[:, None] + inner[None, :], at_weights[None, :] + deep[:, None]
        is_left, is_right = is_x[:, None], is_weight[None, :]
    result = tl.zeros((left.shape[0], right.shape[1]), tl.float32)
    for start in tl.range(0, DEPTH, BLOCK_K):
        if EVEN:
            of_left = tl.load(left) if TURNED else tl.load(left, mask=is_left, other=0.0)
            of_right = tl.load(right, mask=is_right, other=0.0) if TURNED else tl.load(right)
        else:
            in_k = start + inner < DEPTH
            of_left = tl.load(left, mask=is_left & in_k[None, :], other=0.0)
            of_right = tl.load(right, mask=in_k[:, None] & is_right, other=0.0)
        if GROUP > 0:
            scale = tl.load(at_scales + (begin + start) // GROUP, mask=is_weight, other=0.0)
            result += tl.dot(of_left, of_right) * (scale[:, None] if TURNED else scale[None, :])
        else:
            result = tl.dot(of_left, of_right, result, input_precision=PRECISION)
        left += BLOCK_K * stride if TURNED else BLOCK_K
        right += BLOCK_K if TURNED else BLOCK_K * stride
    return tl.trans(result) if TURNED else result
