"""Tensors of the Open Inference Protocol, as Python's values and back. Bad ones are refused by their name."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from baton_proto.generated import open_inference_pb2 as pb
from runtime.errors import InvalidRequestError, shown

MAX_TEXTS: Final = 4096  # elements of a tensor of BYTES
MAX_INPUTS: Final = 256
MAX_DIMENSIONS: Final = 8
MAX_SHOWN: Final = 40  # characters of a name
LENGTH_BYTES: Final = 4  # before each element of BYTES


class Datatype(NamedTuple):
    raw: str  # numpy's name of it
    contents: str  # the field of InferTensorContents; empty: it has none


BYTES: Final = "BYTES"
DATATYPES: Final = {
    "BOOL": Datatype("?", "bool_contents"),
    "INT8": Datatype("<i1", "int_contents"),
    "INT16": Datatype("<i2", "int_contents"),
    "INT32": Datatype("<i4", "int_contents"),
    "INT64": Datatype("<i8", "int64_contents"),
    "UINT8": Datatype("<u1", "uint_contents"),
    "UINT16": Datatype("<u2", "uint_contents"),
    "UINT32": Datatype("<u4", "uint_contents"),
    "UINT64": Datatype("<u8", "uint64_contents"),
    "FP16": Datatype("<f2", ""),
    "FP32": Datatype("<f4", "fp32_contents"),
    "FP64": Datatype("<f8", "fp64_contents"),
    BYTES: Datatype("", "bytes_contents"),
}

Values = Sequence[Any] | np.ndarray
"""Flat, whatever the shape: texts, or numbers."""


def read_inputs(request: pb.ModelInferRequest, max_numbers: int) -> dict[str, Values]:
    """Returns the values of each input by its name. `max_numbers`: the most in one tensor. Raises
    InvalidRequestError."""
    inputs, raw = request.inputs, request.raw_input_contents
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequestError("inputs", f"has {len(inputs)} tensors; at most {MAX_INPUTS} are allowed")
    if raw and len(raw) != len(inputs):
        raise InvalidRequestError("raw_input_contents", f"has {len(raw)} entries for {len(inputs)} inputs")
    found: dict[str, Values] = {}
    for place, tensor in enumerate(inputs):
        if tensor.name in found:
            raise InvalidRequestError(_shown(tensor), "is given twice")
        if tensor.datatype not in DATATYPES:
            raise InvalidRequestError(_shown(tensor), f"has datatype {shown(tensor.datatype)}, not one of {_known()}")
        if len(tensor.shape) > MAX_DIMENSIONS or any(size < 0 for size in tensor.shape):
            raise InvalidRequestError(
                _shown(tensor), f"must have a shape of at most {MAX_DIMENSIONS} sizes, 0 or more each"
            )
        num_values, most = math.prod(tensor.shape), MAX_TEXTS if tensor.datatype == BYTES else max_numbers
        if num_values > most:
            raise InvalidRequestError(_shown(tensor), f"has {num_values} values; at most {most} are allowed")
        if len(tensor.contents.ListFields()) + len(raw[place : place + 1]) > 1:
            problem = "has values in two places: raw_input_contents, or the one field of contents for its datatype"
            raise InvalidRequestError(_shown(tensor), problem)
        values = _raw(tensor, raw[place]) if raw else _contents(tensor, num_values)
        if len(values) != num_values:
            raise InvalidRequestError(_shown(tensor), f"has {len(values)} values, and its shape {num_values}")
        found[tensor.name] = values
    return found


def _shown(tensor: pb.ModelInferRequest.InferInputTensor) -> str:
    return tensor.name[:MAX_SHOWN]


def _known() -> str:
    return ", ".join(DATATYPES)


def _raw(tensor: pb.ModelInferRequest.InferInputTensor, data: bytes) -> Values:
    if tensor.datatype == BYTES:
        return [_text(_shown(tensor), element) for element in _elements(_shown(tensor), data)]
    kind = np.dtype(DATATYPES[tensor.datatype].raw)
    if len(data) % kind.itemsize:
        raise InvalidRequestError(_shown(tensor), f"has {len(data)} bytes, not a multiple of {kind.itemsize}")
    return np.frombuffer(data, kind)


def _elements(name: str, data: bytes) -> Iterator[bytes]:
    at, count = 0, 0
    while at < len(data):
        length = int.from_bytes(data[at : at + LENGTH_BYTES], "little")
        at += LENGTH_BYTES
        count += 1
        if at + length > len(data) or count > MAX_TEXTS:
            raise InvalidRequestError(name, "must have a 32-bit length before each text, and no more than they say")
        yield data[at : at + length]
        at += length


def _contents(tensor: pb.ModelInferRequest.InferInputTensor, num_values: int) -> Values:
    kind = DATATYPES[tensor.datatype]
    if not kind.contents:
        raise InvalidRequestError(_shown(tensor), f"of datatype {tensor.datatype} must stand in raw_input_contents")
    values = getattr(tensor.contents, kind.contents)
    if len(values) != num_values:
        raise InvalidRequestError(_shown(tensor), f"has {len(values)} values, and its shape {num_values}")
    if tensor.datatype == BYTES:
        return [_text(_shown(tensor), element) for element in values]
    return np.array(values)


def _text(name: str, element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(name, f"is not UTF-8: {error.reason} at byte {error.start}") from error


def add_output(response: pb.ModelInferResponse, name: str, datatype: str, values: Sequence[Any]) -> None:
    """Adds the values as raw contents of one dimension."""
    if datatype == BYTES:
        encoded = [text.encode() for text in values]
        raw = b"".join(len(element).to_bytes(LENGTH_BYTES, "little") + element for element in encoded)
    else:
        raw = np.array(values, dtype=DATATYPES[datatype].raw).tobytes()
    response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    response.raw_output_contents.append(raw)
