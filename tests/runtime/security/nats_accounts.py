"""A NATS server that takes only users whom its operator vouches for, as hosted ones do, and the .creds file of one."""

import base64
import json
import re
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nkeys

from baton.service.local.nats_server import find_binary

LIMITS = {"subs": -1, "data": -1, "payload": -1}
ACCOUNT = {"limits": {**LIMITS, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1}}


class Signer:
    def __init__(self, prefix: int) -> None:
        self.seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), prefix)
        self._pair = nkeys.from_seed(bytearray(self.seed))
        self.name: str = self._pair.public_key.decode()

    def certify(self, whom: "Signer", kind: str, claims: dict[str, Any]) -> str:
        """A JSON Web Token."""
        body = {"iss": self.name, "sub": whom.name, "nats": {**claims, "type": kind, "version": 2}}
        head = {"typ": "JWT", "alg": "ed25519-nkey"}
        signed = b".".join(_encoded(json.dumps(part).encode()) for part in (head, body))
        return b".".join((signed, _encoded(self._pair.sign(signed)))).decode()


def _encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


@contextmanager
def hosted_nats(folder: Path) -> Iterator[str]:
    """The URL of a server; the .creds file of its one user is FOLDER/user.creds."""
    operator = Signer(nkeys.PREFIX_BYTE_OPERATOR)
    account, user = Signer(nkeys.PREFIX_BYTE_ACCOUNT), Signer(nkeys.PREFIX_BYTE_USER)
    config = {
        "operator": operator.certify(operator, "operator", {}),
        "resolver": "MEMORY",
        "resolver_preload": {account.name: operator.certify(account, "account", ACCOUNT)},
    }
    (folder / "nats.conf").write_text(json.dumps(config))
    token = account.certify(user, "user", LIMITS)
    (folder / "user.creds").write_text(
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    (folder / "user.creds").chmod(0o600)
    command = [str(find_binary()), "--addr", "127.0.0.1", "--port", "-1", "--config", str(folder / "nats.conf")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            log = ""
            for line in process.stderr:
                log += line
                if "Server is ready" in line:
                    break
            listens = re.search(r"client connections on (\S+)", log)
            assert listens, log
            yield f"nats://{listens[1]}"
        finally:
            process.kill()
