"""Workers are asked for the tokens of an answer that was left, over NATS, so that they need not be computed again."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from baton_proto.routers.left import MAJOR, LeftAnswer
from runtime.nats.client import NATS_ERRORS, NatsClient
from runtime.nats.subjects import left_answers_subject

ANSWER_S: Final = 0.25  # within which a worker answers that has it; without an answer the tokens are computed again

Recall = Callable[[str, int, int], Awaitable[Sequence[int]]]
"""(the request's id that the caller sees, number of tokens, their checksum) -> these tokens, or none."""


async def nobody_recalls(request_id: str, tokens: int, check: int) -> Sequence[int]:
    return ()


def recall_from(nats: NatsClient) -> Recall:
    subject = left_answers_subject(nats.namespace)

    async def recall(request_id: str, tokens: int, check: int) -> Sequence[int]:
        question = msgspec.msgpack.encode(LeftAnswer(MAJOR, request_id, tokens, check))
        try:
            answer = await nats.request(subject, question, ANSWER_S)
        except NATS_ERRORS:
            return ()
        found: list[int] = np.frombuffer(answer, dtype="<u4").tolist() if len(answer) == 4 * tokens else []
        return found

    return recall
