"""What orders to the planner and to the supervisor, over NATS, have in common: the proof that their sender has an
operator key, and a refusal."""

import hashlib
import hmac
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton_proto.decoding import Name, Text

Challenge = Annotated[str, Meta(max_length=64)]
"""What the next order has to prove its key over; a new one after each order."""

Proof = Annotated[str, Meta(max_length=64)]
"""HMAC-SHA256 over the challenge and the encoded order, by an operator key; hexadecimal."""


class Refusal(Struct, frozen=True, tag="refused"):
    field: Name
    problem: Text


_encode: Callable[[Struct], bytes] = msgspec.json.Encoder().encode


def prove(key: str, challenge: str, order: Struct) -> str:
    """The proof that belongs to an order."""
    return hmac.new(key.encode(), challenge.encode() + _encode(order), hashlib.sha256).hexdigest()
