"""The secret that the processes of one service share, and what they show each other in its place.

The key itself is never sent. Each purpose gets its own password or token, derived from the key, which tells nothing
about the key or the other passwords.
"""

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Literal

from runtime.security.secret import Secret

if TYPE_CHECKING:
    from runtime.security.internal_tls import InternalTls

TlsMode = Literal["off", "auto", "on"]  # auto: on, but NCCL between machines passes without it

NATS = "nats"
WORKER_CALLS = "worker calls"
OPERATOR = "operator"
PROOFS = "proofs"
CERTIFICATES = "certificates"


class ClusterKey:
    """`mode`: whether those who have the key speak TLS to each other."""

    def __init__(self, secret: Secret, mode: TlsMode = "off") -> None:
        self.secret = secret
        self.mode: TlsMode = mode
        self.tls = None if mode == "off" else _tls(self._derived(CERTIFICATES))
        self._proofs = self._derived(PROOFS)

    def derive(self, purpose: str) -> Secret:
        return Secret(self._derived(purpose).hex())

    def proof(self, message: bytes) -> bytes:
        """32 bytes that only a holder of the key can compute."""
        return hmac.digest(self._proofs, message, hashlib.sha256)

    def _derived(self, purpose: str) -> bytes:
        return hmac.digest(self.secret.reveal().encode(), f"baton {purpose}".encode(), hashlib.sha256)


def new_cluster_key(mode: TlsMode = "off") -> ClusterKey:
    return ClusterKey(Secret(secrets.token_hex(32)), mode)


def _tls(seed: bytes) -> "InternalTls":
    from runtime.security.internal_tls import InternalTls  # here, because most commands need no certificates

    return InternalTls(seed)
