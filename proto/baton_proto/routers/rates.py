"""What the callers with limits have taken at a router, on `baton.<namespace>.rates.<router_id>`, core NATS.

Numbers are totals since the router's start, so that a message that is lost is made good by the next one.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton_proto.decoding import Count, Name, Rows, versioned

MAJOR = 1

Level = Annotated[float, Meta(ge=-(2**53), le=2**53)]


class KeyRates(Struct, frozen=True):
    key: Name  # its name, which tells nobody the key
    requests: Count
    tokens: Count
    requests_level: Level = 0.0  # what is left of the minute's; below 0: owed
    tokens_level: Level = 0.0


class RateReport(Struct, frozen=True):
    version: Count
    router_id: Name
    incarnation: Count
    keys: Annotated[list[KeyRates], Rows] = []  # those that have changed


encode_rates: Callable[[RateReport], bytes] = msgspec.msgpack.Encoder().encode
decode_rates = versioned(RateReport, "rate report", MAJOR)
