"""How many fields a protobuf message has, found on the wire before anything is decoded.

Because decoding does not let other threads run and its time depends on the number of fields, a long message is counted
first, field by field. Encoding: https://protobuf.dev/programming-guides/encoding/
"""

import numpy as np
from google.protobuf.descriptor import Descriptor

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT = 10  # bytes
CONTINUES = 0x80  # a number goes on behind such a byte
PACKED_PER_FIELD = 16  # as many take as long as one field
FIXED_BYTES = {FIXED64: 8, FIXED32: 4}


def num_fields(data: bytes, kind: Descriptor, limit: int) -> int:
    """With those of the messages inside; PACKED_PER_FIELD packed numbers count as one. Ends early above `limit`, and at
    what is no message."""
    counted = 0
    waiting = [(0, len(data), kind)]
    while waiting:
        at, end, kind = waiting.pop()
        while at < end and counted <= limit:
            tag, at = _varint(data, at)
            counted += 1
            wire_type = tag & 7
            if wire_type == VARINT:
                _, at = _varint(data, at)
            elif wire_type == BYTES:
                length, at = _varint(data, at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    waiting.append((at, min(end, at + length), field.message_type))
                elif field is not None and field.is_packed:
                    packed = np.frombuffer(data, np.uint8)[at : at + length]
                    counted += int(np.count_nonzero(packed < CONTINUES)) // PACKED_PER_FIELD
                at += length
            else:
                at += FIXED_BYTES.get(wire_type, 0)
    return counted


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, place behind it)."""
    value = 0
    for shift, byte in enumerate(data[at : at + MAX_VARINT]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < CONTINUES:
            return value, at + shift + 1
    return value, len(data)
