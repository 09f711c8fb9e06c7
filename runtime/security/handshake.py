"""How both ends of a connection between processes of a service prove to each other that they have the cluster key.

    dialer -> listener   MAGIC, nonce of the dialer
    listener -> dialer   nonce of the listener
    dialer -> listener   HMAC-SHA256(key, "dialer", plane, both nonces)
    listener -> dialer   HMAC-SHA256(key, "listener", plane, both nonces)

A recorded proof is worthless because both nonces are fresh; a proof that is sent back, because of the role's name; a
proof made for another kind of connection, because of the plane's name. The listener answers nothing to a peer that
begins in another way, and proves nothing to a peer that has not proved itself. The handshake comes first on a
connection, or after TLS. It does not protect the bytes that follow against somebody who can change packets; TLS does.

The handshakes are generators without I/O: each yields what is to be sent and gets the answer, a frame of at most
MAX_FRAME_BYTES, and returns what is to be sent last.
"""

import hmac
import secrets
import ssl
from collections.abc import Generator
from typing import Final, TypeAlias

from runtime.errors import ProtocolError, UnauthorizedError
from runtime.security.cluster_key import ClusterKey

MAGIC: Final = b"BATON-1\n"
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
MAX_FRAME_BYTES: Final = len(MAGIC) + NONCE_BYTES
STREAM_PLANE: Final = b"stream"
KV_PLANE: Final = b"kv"
TLS_ERRORS: Final = (ssl.SSLError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError)

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


def tls_failure(peer: str, error: OSError) -> UnauthorizedError:
    """What to say when TLS with `peer`, which comes before the handshake, has failed with one of TLS_ERRORS."""
    remedy = "security.internal_tls and the cluster key have to be the same at both ends"
    why = getattr(error, "verify_message", "") or getattr(error, "reason", "") or "it hung up"
    return UnauthorizedError(peer, f"{remedy} (TLS: {why})")


def _proof(key: ClusterKey, role: bytes, plane: bytes, dialer_nonce: bytes, listener_nonce: bytes) -> bytes:
    return key.proof(b"\0".join((role, plane, dialer_nonce + listener_nonce)))
