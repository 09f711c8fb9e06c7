"""The secret that the processes of one service share, and what they show each other in its place.

The key itself is never sent. Whatever needs a password or token of its own gets one derived from it, so that none of
them tells anything about the key or the others.
"""

import hashlib
import hmac
import secrets

from runtime.security.secret import Secret

MIN_LENGTH = 32  # characters: a proof that somebody has recorded must not be guessable
NATS = "nats"
WORKER_CALLS = "worker calls"
PROOFS = "proofs"


class ClusterKey:
    def __init__(self, secret: Secret) -> None:
        self.secret = secret
        self._proofs = self._derived(PROOFS)

    def derive(self, purpose: str) -> Secret:
        return Secret(self._derived(purpose).hex())

    def proof(self, message: bytes) -> bytes:
        """32 bytes that only who has the key can make."""
        return hmac.digest(self._proofs, message, hashlib.sha256)

    def _derived(self, purpose: str) -> bytes:
        return hmac.digest(self.secret.reveal().encode(), f"baton {purpose}".encode(), hashlib.sha256)


def new_cluster_key() -> ClusterKey:
    return ClusterKey(Secret(secrets.token_hex(32)))
