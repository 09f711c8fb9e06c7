"""Carries out the proof of the cluster key on a socket, before the first message of a KV connection."""

import socket

from runtime.security.handshake import MAX_FRAME_BYTES, Handshake
from runtime.streams.door import Talk, in_time, received, sent
from runtime.streams.length_prefix import PREFIX_BYTES, body_bytes, framed


def prove(sock: socket.socket, handshake: Handshake, timeout_s: float) -> None:
    """The dialer's side; the socket does not block afterwards. Raises ProtocolError when the peer does not prove
    itself, OSError when it leaves or the whole proof takes longer than `timeout_s`."""
    in_time(sock, proof(sock, handshake), timeout_s)


def proof(sock: socket.socket, handshake: Handshake) -> Talk[None]:
    """Raises ProtocolError when the peer does not prove itself, OSError when it leaves."""
    out = next(handshake)
    while True:
        yield from _say(sock, out)
        answer = yield from frame(sock, MAX_FRAME_BYTES)
        try:
            out = handshake.send(answer)
        except StopIteration as done:
            yield from _say(sock, done.value)
            return


def frame(sock: socket.socket, limit_bytes: int) -> Talk[bytes]:
    """The next frame, and no byte more. Raises ProtocolError when it is longer than the limit."""
    prefix = yield from _exactly(sock, PREFIX_BYTES)
    return (yield from _exactly(sock, body_bytes(prefix, limit_bytes, "a stranger")))


def _say(sock: socket.socket, body: bytes) -> Talk[None]:
    if body:
        yield from sent(sock, framed(body))


def _exactly(sock: socket.socket, size: int) -> Talk[bytes]:
    data = b""
    while len(data) < size:
        data += yield from received(sock, size - len(data))
    return data
