"""Messages on a stream between a process and its helper: the length of each in 4 bytes, then its body."""

import socket
import struct
from typing import Final

MAX_BYTES: Final = 4 * 1024 * 1024  # a grammar of MAX_GRAMMAR_CHARS takes 1 MB at most
_LENGTH = struct.Struct(">I")


def send(peer: socket.socket, body: bytes) -> None:
    """Raises OSError."""
    peer.sendall(_LENGTH.pack(len(body)) + body)


def received(peer: socket.socket) -> bytes | None:
    """The body of the next message; None: the stream has ended, or is none of ours."""
    head = _exactly(peer, _LENGTH.size)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    return _exactly(peer, size) if size <= MAX_BYTES else None


def _exactly(peer: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        try:
            piece = peer.recv(size - len(data))
        except ConnectionError:  # who died with our message unread
            return None
        if not piece:
            return None
        data += piece
    return bytes(data)
