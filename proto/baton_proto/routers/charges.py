"""What a router tells the others about the work that it has sent to each worker.

Subject `baton.<namespace>.charges.<router_id>`, core NATS. Numbers are totals, not differences: the next message that
names the same worker, at the latest the next full one, makes up for a lost message.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Struct

from baton_proto.decoding import Count, Name, Rows, versioned

MAJOR = 1


class WorkerCharge(Struct, frozen=True, array_like=True):
    """The work that one router has charged to one worker and not taken back."""

    worker_id: Name
    incarnation: Count
    requests: Count
    prefill_tokens: Count
    blocks: Count
    prefill_pairs: Count = 0  # (token, earlier token) pairs of prefill_tokens: work of attention


class ChargeReport(Struct, frozen=True):
    version: Count
    router_id: Name
    incarnation: Count  # of the router
    workers: Annotated[list[WorkerCharge], Rows]
    full: bool  # True: workers that are not named are charged nothing
    leaving: bool = False  # the router's last word


encode_charges: Callable[[ChargeReport], bytes] = msgspec.msgpack.Encoder().encode
decode_charges = versioned(ChargeReport, "charge report", MAJOR)
