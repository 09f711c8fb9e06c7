"""How an order over NATS proves that its sender has an operator key."""

import hashlib
import hmac
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

Challenge = Annotated[str, Meta(max_length=64)]
"""What the next order has to prove its key over; a new one after each order."""

Proof = Annotated[str, Meta(max_length=64)]
"""HMAC-SHA256 over the challenge and the encoded order, by an operator key; hexadecimal."""

_encode: Callable[[Struct], bytes] = msgspec.json.Encoder().encode


def prove(key: str, challenge: str, order: Struct) -> str:
    """The proof that belongs to an order."""
    return hmac.new(key.encode(), challenge.encode() + _encode(order), hashlib.sha256).hexdigest()
