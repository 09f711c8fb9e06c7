"""What a router tells the others about the work that it has sent to each worker.

Subject `baton.<namespace>.charges.<router_id>`, core NATS. Numbers are totals, not differences: the next message that
names the same worker, at the latest the next full one, makes up for a lost message.
"""

import msgspec
from msgspec import Struct

from baton_proto.decoding import Count, decoder
from baton_proto.version import check_major

MAJOR = 1


class WorkerCharge(Struct, frozen=True, array_like=True):
    """The work that one router has charged to one worker and not taken back."""

    worker_id: str
    incarnation: Count
    requests: Count
    prefill_tokens: Count
    blocks: Count
    prefill_pairs: Count = 0  # (token, earlier token) pairs of prefill_tokens: work of attention


class ChargeReport(Struct, frozen=True):
    version: Count
    router_id: str
    incarnation: Count  # of the router
    workers: list[WorkerCharge]
    full: bool  # True: workers that are not named are charged nothing
    leaving: bool = False  # the router's last word


_encoder = msgspec.msgpack.Encoder()
_decode = decoder(ChargeReport)


def encode_charges(report: ChargeReport) -> bytes:
    return _encoder.encode(report)


def decode_charges(data: bytes) -> ChargeReport:
    """Raises msgspec.DecodeError."""
    report: ChargeReport = _decode(data)
    check_major("charge report", report.version, MAJOR)
    return report
