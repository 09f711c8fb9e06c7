"""Carries out the proof of the cluster key on a blocking socket, before the first message of a KV connection."""

import socket
import struct
import time

from runtime.errors import ProtocolError
from runtime.security.handshake import MAX_FRAME_BYTES, Handshake

_LENGTH = struct.Struct("<I")


def prove(sock: socket.socket, handshake: Handshake, timeout_s: float) -> None:
    """Leaves the socket with another timeout. Raises ProtocolError when the peer does not prove itself, OSError when it
    leaves or all of it takes longer than `timeout_s`."""
    give_up_s = time.monotonic() + timeout_s
    out = next(handshake)
    while True:
        _send(sock, out)
        (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size, give_up_s))
        if length > MAX_FRAME_BYTES:
            raise ProtocolError("a stranger", f"announces {length} bytes in the place of a proof")
        try:
            out = handshake.send(_receive(sock, length, give_up_s))
        except StopIteration as done:
            _send(sock, done.value)
            return


def _send(sock: socket.socket, frame: bytes) -> None:
    if frame:
        sock.sendall(_LENGTH.pack(len(frame)) + frame)


def _receive(sock: socket.socket, size: int, give_up_s: float) -> bytes:
    received = b""
    while len(received) < size:
        sock.settimeout(max(0.001, give_up_s - time.monotonic()))
        if not (part := sock.recv(size - len(received))):
            raise ConnectionResetError("the peer left before both had shown the cluster key")
        received += part
        if time.monotonic() >= give_up_s:
            raise TimeoutError("the cluster key was not shown in time")
    return received
