"""Counts the fields of a protobuf message on the wire, before anything is decoded.

Because decoding does not let other threads run and its time depends on the number of fields, a long message is counted
first, field by field. Encoding: https://protobuf.dev/programming-guides/encoding/
"""

from functools import cache

import numpy as np
from google.protobuf.descriptor import Descriptor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT = 10  # bytes
CONTINUES = 0x80  # a number goes on behind such a byte
PACKED_PER_FIELD = 16  # as many take as long as one field
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


def num_fields(data: bytes, kind: Descriptor, limit: int) -> int:
    """Counts the fields of the message and of those inside; PACKED_PER_FIELD packed numbers count as one. Ends early
    above `limit`, and at what is no message."""
    at, end, inside = 0, len(data), _inside(kind)
    around: list[tuple[int, dict[int, Descriptor | None]]] = []  # the messages that this one lies in, the nearest last
    counted = 0
    while counted <= limit:
        while at >= end and around:
            end, inside = around.pop()
        if at >= end:
            break
        tag, at = _varint(data, at)
        counted += 1
        wire_type = tag & 7
        if wire_type == VARINT:
            _, at = _varint(data, at)
        elif wire_type == BYTES:
            length, at = _varint(data, at)
            behind = at + length
            if tag >> 3 not in inside:
                at = behind
            elif (message := inside[tag >> 3]) is None:
                packed = np.frombuffer(data, np.uint8)[at:behind]
                counted += int(np.count_nonzero(packed < CONTINUES)) // PACKED_PER_FIELD
                at = behind
            else:
                around.append((end, inside))
                end, inside = min(end, behind), _inside(message)
        else:
            at += FIXED_BYTES.get(wire_type, 0)
    return counted


@cache
def _inside(kind: Descriptor) -> dict[int, Descriptor | None]:
    """Number of a field -> the kind of its messages; None: its numbers may be packed."""
    fields = kind.fields_by_number.items()
    return {number: field.message_type for number, field in fields if field.message_type or field.is_packed}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, place behind it)."""
    if at < len(data) and data[at] < CONTINUES:
        return data[at], at + 1
    value = 0
    for shift, byte in enumerate(data[at : at + MAX_VARINT]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < CONTINUES:
            return value, at + shift + 1
    return value, len(data)
