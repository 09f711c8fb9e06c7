"""How both ends of a connection between processes of a service prove to each other that they have the cluster key.

    dialer -> listener   MAGIC, nonce of the dialer
    listener -> dialer   nonce of the listener
    dialer -> listener   HMAC-SHA256(key, "dialer", plane, both nonces)
    listener -> dialer   HMAC-SHA256(key, "listener", plane, both nonces)

Fresh nonces of both sides make a recorded proof worthless, the roles' names one that is sent back, the plane's name one
that was made for another kind of connection. The listener says nothing to who does not begin as above, and proves
nothing to who has not. It comes before anything else and does not protect what follows from who can change packets.

Generators without I/O: each yields what is to be sent and gets the answer, a frame of MAX_FRAME_BYTES at most, and
returns what is to be sent last. `runtime.streams.message_stream` and `kvtransfer.wire.proving` carry them out.
"""

import hmac
import secrets
from collections.abc import Generator
from typing import Final, TypeAlias

from runtime.errors import ProtocolError
from runtime.security.cluster_key import ClusterKey

MAGIC: Final = b"BATON-1\n"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MAX_FRAME_BYTES: Final = len(MAGIC) + NONCE_BYTES
STREAM_PLANE: Final = b"stream"
KV_PLANE: Final = b"kv"

Handshake: TypeAlias = Generator[bytes, bytes, bytes]


def dialing(key: ClusterKey, plane: bytes, peer: str) -> Handshake:
    """Raises ProtocolError when `peer` does not prove that it has the key."""
    ours = secrets.token_bytes(NONCE_BYTES)
    theirs = yield MAGIC + ours
    if len(theirs) != NONCE_BYTES:
        raise ProtocolError(peer, "does not ask for the cluster key")
    proof = yield _proof(key, b"dialer", plane, ours, theirs)
    if not hmac.compare_digest(proof, _proof(key, b"listener", plane, ours, theirs)):
        raise ProtocolError(peer, "has another cluster key")
    return b""


def listening(key: ClusterKey, plane: bytes, peer: str) -> Handshake:
    """Raises ProtocolError when `peer` does not prove that it has the key."""
    first = yield b""
    if len(first) != MAX_FRAME_BYTES or not first.startswith(MAGIC):
        raise ProtocolError(peer, "does not know how to show the cluster key")
    theirs, ours = first.removeprefix(MAGIC), secrets.token_bytes(NONCE_BYTES)
    proof = yield ours
    if not hmac.compare_digest(proof, _proof(key, b"dialer", plane, theirs, ours)):
        raise ProtocolError(peer, "has another cluster key")
    return _proof(key, b"listener", plane, theirs, ours)


def _proof(key: ClusterKey, role: bytes, plane: bytes, dialer_nonce: bytes, listener_nonce: bytes) -> bytes:
    return key.proof(b"\0".join((role, plane, dialer_nonce + listener_nonce)))
