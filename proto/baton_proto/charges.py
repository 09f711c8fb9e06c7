"""What a router tells the others about the work that it has sent to each worker.

Subject `baton.<namespace>.charges.<router_id>`, core NATS. Numbers are totals, not differences: a message that is lost
is made good by the next one that names the same worker, at the latest by the next full one.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton_proto.version import check_major

MAJOR = 1

Count = Annotated[int, Meta(ge=0, le=2**62)]


class WorkerCharge(Struct, frozen=True, array_like=True):
    """All that one router has charged one worker and not taken back."""

    worker_id: str
    incarnation: int
    requests: Count
    prefill_tokens: Count
    blocks: Count
    prefill_pairs: Count = 0  # of prefill_tokens with the tokens before each


class ChargeReport(Struct, frozen=True):
    version: int
    router_id: str
    incarnation: int  # of the router
    workers: list[WorkerCharge]
    full: bool  # workers that are not named are charged nothing
    leaving: bool = False  # the router's last word


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChargeReport)


def encode_charges(report: ChargeReport) -> bytes:
    return _encoder.encode(report)


def decode_charges(data: bytes) -> ChargeReport:
    """Raises msgspec.DecodeError or ProtocolError."""
    report = _decoder.decode(data)
    check_major("charge report", report.version, MAJOR)
    return report
