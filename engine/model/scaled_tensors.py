"""Matrices of 8- and 4-bit numbers, which have scales (runtime/checkpoint/quantization.py)."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from engine.model.mapped_file import Entry, Scale
from runtime.checkpoint.model_config import read_object
from runtime.checkpoint.quantization import Quantization, parse_quantization
from runtime.errors import ModelError

QUANTIZED = (torch.float8_e4m3fn, torch.uint8)  # dtypes
_SCALES = ("_scale_inv", "_scale")  # behind a matrix's name
_UNUSED = (".input_scale", ".activation_scale")  # of activations: not used
_BLOCKS, _EXPONENTS = "_blocks", "_scales"  # behind the name of matrices in MXFP4
_GROUP = 32  # numbers that share an exponent
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4 = torch.tensor([*_HALF, *(-number for number in _HALF)])


def with_scales(entries: dict[str, Entry], folder: Path) -> dict[str, Entry]:
    """The tensors of a checkpoint in which some have scales. Raises ModelError."""
    model = str(folder)
    how = parse_quantization(read_object(folder / "config.json"), model)
    if how is None:
        raise ModelError(model, "has tensors of 8-bit numbers, and its config.json no quantization_config")
    whole = {name: entry for name, entry in entries.items() if not name.endswith(_UNUSED)}
    for name in [name for name, entry in whole.items() if entry.dtype in QUANTIZED and not name.endswith(_EXPONENTS)]:
        stem = name.removesuffix(_BLOCKS)
        scales = [whole.pop(stem + end) for end in (*_SCALES, _EXPONENTS) if stem + end in whole]
        if len(scales) != 1:
            raise ModelError(model, f"tensor {name} has {len(scales)} scales, expected one")
        one_of = _matrices if name.endswith(_BLOCKS) else _matrix
        whole[stem] = one_of(name, whole.pop(name), scales[0], how, model)
    return whole


def scaled(values: Tensor, shape: tuple[int, ...], scale: Scale) -> Tensor:
    """The products in float32, of flat values."""
    if values.dtype == torch.uint8:
        exponents = _numbers(scale.entry)
        return _unpacked(values.view(*exponents.shape, _GROUP // 2), exponents)
    return values.view(shape).float() * spread(scale, shape)


def spread(scale: Scale, shape: tuple[int, ...], group: int = 1) -> Tensor:
    """float32 [rows, columns // group], one scale for each `group` neighbours in a row; `group` divides blocks."""
    factors, (rows, columns) = _numbers(scale.entry).float(), shape
    if not has_blocks(scale, shape) or scale.block is None:
        return factors.reshape(-1, 1).expand(rows, columns // group)
    factors = factors.repeat_interleave(scale.block[0], 0)[:rows]
    return factors.repeat_interleave(scale.block[1] // group, 1)[:, : columns // group]


def has_blocks(scale: Scale, shape: tuple[int, ...]) -> bool:
    return scale.block is not None and scale.entry.shape == _blocks(shape, scale.block)


def _numbers(entry: Entry) -> Tensor:
    return entry.data[entry.start : entry.end].clone().view(entry.dtype).view(entry.shape)


def _unpacked(pairs: Tensor, exponents: Tensor) -> Tensor:
    """pairs: [experts, rows, groups, 16], of numbers in one byte, the first one in its low half. Returns
    [experts, columns, rows], as gpt-oss has matrices."""
    numbers = torch.empty(*exponents.shape, _GROUP)
    for pair, exponent, to in zip(pairs, exponents, numbers, strict=True):  # indices take four times the memory
        codes = torch.stack((pair & 15, pair >> 4), dim=-1).flatten(-2)
        to.copy_(torch.ldexp(_FP4[codes.int()], exponent.int()[..., None] - 127))
    return numbers.flatten(2).mT


def _matrices(name: str, values: Entry, scale: Entry, how: Quantization, model: str) -> Entry:
    is_known = how.is_mxfp4 and values.dtype == scale.dtype == torch.uint8 and len(scale.shape) == 3
    if not is_known or values.shape != (*scale.shape, _GROUP // 2):
        problem = f"tensor {name} has shape {list(values.shape)}, and its scales {list(scale.shape)}: they do not fit"
        raise ModelError(model, problem)
    experts, rows, groups = scale.shape
    return dataclasses.replace(values, shape=(experts, groups * _GROUP, rows), scale=Scale(scale, None))


def _matrix(name: str, values: Entry, scale: Entry, how: Quantization, model: str) -> Entry:
    if len(values.shape) != 2 or values.dtype == torch.uint8:
        problem = f"tensor {name} has shape {list(values.shape)} and dtype {values.dtype}, expected a matrix of fp8"
        raise ModelError(model, problem)
    expected = [(), (1,), (1, 1), (values.shape[0], 1)]
    if how.block is not None:
        expected.append(_blocks(values.shape, how.block))
    if scale.shape not in expected or scale.dtype in QUANTIZED:
        problem = f"the scale of tensor {name} has shape {list(scale.shape)}, expected one of {expected}"
        raise ModelError(model, problem)
    return dataclasses.replace(values, scale=Scale(scale, how.block))


def _blocks(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-size // of_block) for size, of_block in zip(shape, block, strict=True))
