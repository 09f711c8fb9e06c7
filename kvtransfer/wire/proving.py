"""Carries out the proof of the cluster key on a blocking socket, before the first message of a KV connection."""

import socket
import time

from runtime.security.handshake import MAX_FRAME_BYTES, Handshake
from runtime.streams.length_prefix import PREFIX_BYTES, body_bytes, framed


def prove(sock: socket.socket, handshake: Handshake, timeout_s: float) -> None:
    """Changes the socket's timeout. Raises ProtocolError when the peer does not prove itself, OSError when it leaves or
    the whole proof takes longer than `timeout_s`."""
    give_up_s = time.monotonic() + timeout_s
    out = next(handshake)
    while True:
        _send(sock, out)
        nbytes = body_bytes(_receive(sock, PREFIX_BYTES, give_up_s), MAX_FRAME_BYTES, "a stranger")
        try:
            out = handshake.send(_receive(sock, nbytes, give_up_s))
        except StopIteration as done:
            _send(sock, done.value)
            return


def _send(sock: socket.socket, frame: bytes) -> None:
    if frame:
        sock.sendall(framed(frame))


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
