"""Tensors of a checkpoint as matrices of 8 bits: the file's own numbers and scales, or what is rounded to them.

Invariant: ranks round whole rows and then take their parts, so they have the numbers that one rank has.
"""

import dataclasses
import math

import torch
from torch import Tensor

from engine.model.checkpoint import cut, loaded
from engine.model.fp8_matrix import Fp8Matrix, rounded
from engine.model.mapped_file import Entry
from engine.model.scaled_tensors import has_blocks, spread
from engine.model.shard import Part

_PROJECTIONS = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")  # heads and routers stay as they are
_MULTIPLE = 16  # of rows and columns, which torch._scaled_mm asks for
_LEAST_GROUP = 32  # columns of a tile that are multiplied at once


def group_of(name: str, entry: Entry) -> int:
    """How many neighbours in a row of the matrix share a scale; 0: it is not served in 8 bits."""
    if not name.endswith(_PROJECTIONS) or len(entry.shape) != 2 or any(size % _MULTIPLE for size in entry.shape):
        return 0
    group = _group(entry)
    return group if group == entry.shape[1] or (group >= _LEAST_GROUP and group.bit_count() == 1) else 0


def read(entry: Entry, group: int, device: torch.device) -> Fp8Matrix:
    """The matrix, or the part of it that a rank holds."""
    if entry.scale is None or _group(entry) % group:
        parts = [part for part in entry.parts if part.dimension == 0]
        rows = dataclasses.replace(entry, shape=(entry.shape[0], entry.whole[1]), parts=tuple(parts))
        columns = next((part for part in entry.parts if part.dimension == 1), None)
        return rounded_part(loaded(rows).to(device), group, columns)
    scales = spread(entry.scale, entry.whole, group)
    for dimension, _, held in entry.parts:
        step = group if dimension else 1
        scales = scales.narrow(dimension, held.start // step, len(held) // step)
    return Fp8Matrix(loaded(dataclasses.replace(entry, scale=None)), scales)


def rounded_part(whole: Tensor, group: int, part: Part | None) -> Fp8Matrix:
    """The part of a matrix, rounded."""
    if part is None or part.dimension == 0:
        return rounded(cut(whole, part), group)
    held = part.held
    step = part.whole if group == len(held) else group
    matrix = rounded(whole, step)
    scales = matrix.scales.narrow(1, held.start // step, len(held) // step or 1)
    return Fp8Matrix(cut(matrix.values, part), scales)


def _group(entry: Entry) -> int:
    scale, whole = entry.scale, entry.whole
    if scale is None or scale.block is None or not has_blocks(scale, whole):
        return entry.shape[1]
    cuts = [end for part in entry.parts if part.dimension == 1 for end in (part.held.start, part.held.stop)]
    return math.gcd(scale.block[1], whole[1], *cuts)
