"""What a router tells the others about the work that it has sent to each worker.

Subject `baton.<namespace>.charges.<router_id>`, core NATS. Numbers are totals, not differences: the next message that
names the same worker, at the latest the next full one, makes up for a lost message.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from baton_proto.version import check_major

MAJOR = 1

Count = Annotated[int, Meta(ge=0, le=2**62)]


class WorkerCharge(Struct, frozen=True, array_like=True):
    """The work that one router has charged to one worker and not taken back."""

    worker_id: str
    incarnation: int
    requests: Count
    prefill_tokens: Count
    blocks: Count
    prefill_pairs: Count = 0  # (token, earlier token) pairs of prefill_tokens: work of attention


class ChargeReport(Struct, frozen=True):
    version: int
    router_id: str
    incarnation: int  # of the router
    workers: list[WorkerCharge]
    full: bool  # True: workers that are not named are charged nothing
    leaving: bool = False  # the router's last word


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChargeReport)


def encode_charges(report: ChargeReport) -> bytes:
    return _encoder.encode(report)


def decode_charges(data: bytes) -> ChargeReport:
    """Raises msgspec.DecodeError when malformed, its VersionError when of another major version."""
    report = _decoder.decode(data)
    check_major("charge report", report.version, MAJOR)
    return report
