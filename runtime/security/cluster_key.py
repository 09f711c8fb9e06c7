"""The secret that the processes of one service share, and what they show each other in its place.

The key itself is never sent. Each purpose gets its own password or token, derived from the key, which tells nothing
about the key or the other passwords.
"""

import hashlib
import hmac
import secrets

from runtime.security.secret import Secret

MIN_LENGTH = 32  # characters: nobody must find the key by trying keys on a recorded proof
NATS = "nats"
WORKER_CALLS = "worker calls"
OPERATOR = "operator"
PROOFS = "proofs"


class ClusterKey:
    def __init__(self, secret: Secret) -> None:
        self.secret = secret
        self._proofs = self._derived(PROOFS)

    def derive(self, purpose: str) -> Secret:
        return Secret(self._derived(purpose).hex())

    def proof(self, message: bytes) -> bytes:
        """32 bytes that only a holder of the key can compute."""
        return hmac.digest(self._proofs, message, hashlib.sha256)

    def _derived(self, purpose: str) -> bytes:
        return hmac.digest(self.secret.reveal().encode(), f"baton {purpose}".encode(), hashlib.sha256)


def new_cluster_key() -> ClusterKey:
    return ClusterKey(Secret(secrets.token_hex(32)))
