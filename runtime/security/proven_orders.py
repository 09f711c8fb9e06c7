"""Who may give orders over NATS: senders that prove that they have an operator key."""

import hmac
import secrets
from collections.abc import Sequence

from msgspec import Struct

from baton_proto.orders import prove
from runtime.errors import InvalidRequestError
from runtime.security.callers import key_name
from runtime.security.keys import OPERATOR_REMEDY
from runtime.security.secret import Secret


class ProvenOrders:
    """`field`: who takes the orders, in refusals. `operators`: keys, one of which an order has to prove; without any,
    all orders are taken. The next order proves its key over `challenge`."""

    def __init__(self, field: str, operators: Sequence[Secret]) -> None:
        self._field = field
        self._operators = operators
        self.challenge = secrets.token_hex(16)

    def check(self, order: Struct, proof: str) -> str:
        """The name of the key. Raises InvalidRequestError. A proof is taken once."""
        proofs = [prove(key.reveal(), self.challenge, order) for key in self._operators]
        right = [hmac.compare_digest(one.encode(), proof.encode()) for one in proofs]
        if proofs and not any(right):
            wrong = "this is not the operator key, or another order came first"
            raise InvalidRequestError(
                self._field, (wrong if proof else "the operator key is missing") + OPERATOR_REMEDY
            )
        self.challenge = secrets.token_hex(16)
        return key_name(self._operators[right.index(True)]) if proofs else ""
