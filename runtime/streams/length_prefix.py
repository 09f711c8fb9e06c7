"""The frame of every stream between Baton's processes: u32 LE length, then a body of that many bytes."""

import struct

from runtime.errors import ProtocolError

_PREFIX = struct.Struct("<I")
PREFIX_BYTES = _PREFIX.size


def framed(body: bytes) -> bytes:
    return _PREFIX.pack(len(body)) + body


def body_bytes(data: bytes | bytearray, limit_bytes: int, peer: str, offset: int = 0) -> int:
    """The length that the prefix at `offset` of `data` announces. Raises ProtocolError when it is above the limit."""
    nbytes: int = _PREFIX.unpack_from(data, offset)[0]
    if nbytes > limit_bytes:
        raise ProtocolError(peer, f"announces {nbytes} bytes; a message has {limit_bytes} at most")
    return nbytes
