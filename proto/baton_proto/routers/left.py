"""The question of a router to all workers: which tokens had an answer that was left before its end?

A client that comes back tells how many tokens it has, and their checksum alone. A worker that had the answer tells the
tokens, so they need not be computed again. Workers that did not have it do not answer.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from baton_proto.decoding import Count, Name, Small, versioned

MAJOR = 1
NOTHING_READ: Final = 0x811C9DC5  # the checksum of no tokens


class LeftAnswer(Struct, frozen=True):
    """The reply is the `tokens` first token ids of the answer's output as u32 LE."""

    version: Count
    request_id: Name  # that the caller sees; a worker knows it with an ending
    tokens: Small
    check: Count  # of these tokens, see `read_on`


def read_on(check: int, token_ids: Sequence[int]) -> int:
    """The checksum of tokens, FNV-1a of their ids, once `token_ids` follow."""
    for token_id in token_ids:
        check = (check ^ token_id) * 0x01000193 & 0xFFFFFFFF
    return check


decode_left_answer = versioned(LeftAnswer, "question for an answer that was left", MAJOR)
