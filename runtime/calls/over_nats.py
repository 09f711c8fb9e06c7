"""A question to one process of a service, and its answer: request and reply over NATS."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from baton_proto.orders import Refusal, prove
from runtime.errors import (
    BatonError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    ProtocolError,
    UnavailableError,
)
from runtime.nats.client import NatsClient
from runtime.nats.library import nats_errors
from runtime.security.secret import Secret

A = TypeVar("A", covariant=True)
K = TypeVar("K")
Q = TypeVar("Q")


class Answer(Protocol[A]):
    @property
    def body(self) -> A | Refusal: ...


async def answer_of(
    who: str,
    nats: NatsClient,
    subject: str,
    question: bytes,
    decode: Callable[[bytes], Answer[A]],
    timeout_s: float,
    absent: str,
) -> A:
    """The body of the answer of `who`. Raises InvalidRequestError when it is a refusal, UnavailableError with the words
    `absent` when nobody listens on the subject, DeadlineError when no answer comes in time, ProtocolError when it
    cannot be decoded, and NATS_ERRORS."""
    try:
        data = await nats.request(subject, question, timeout_s)
    except nats_errors.NoRespondersError as error:
        raise UnavailableError(absent) from error
    except (nats_errors.TimeoutError, TimeoutError) as error:
        raise DeadlineError(f"the {who}'s answer", timeout_s) from error
    try:
        answer = decode(data).body
    except msgspec.DecodeError as error:
        raise ProtocolError(who, f"its answer cannot be read: {error}") from error
    if isinstance(answer, Refusal):
        raise InvalidRequestError(answer.field, answer.problem)
    return answer


async def answered(
    who: str, data: bytes, decode: Callable[[bytes], Q], answer: Callable[[Q], Awaitable[K]]
) -> K | Refusal:
    """What `answer` says to a question that has come; a refusal where it raises a BatonError, or `data` is no question.
    `who` answers."""
    try:
        return await answer(decode(data))
    except InvalidRequestError as error:
        return Refusal(error.field, error.problem)
    except ConfigError as error:
        return Refusal(error.where, error.problem)
    except BatonError as error:
        return Refusal(who, str(error))
    except msgspec.DecodeError as error:
        return Refusal("question", str(error))


@dataclass(frozen=True, slots=True)
class Desk:
    """Where a process takes questions, and orders with a proof of an operator key. `subject`: by namespace; `absent`:
    what to say when nobody is there, with {} for the namespace; `question`: the message of a body and a proof. Calls
    raise as `answer_of` does."""

    who: str
    subject: Callable[[str], str]
    absent: str
    question: Callable[[Any, str], bytes]
    decode: Callable[[bytes], Answer[Any]]

    async def ask(self, nats: NatsClient, body: Struct, kind: type[K], timeout_s: float, proof: str = "") -> K:
        """`kind`: of the answer."""
        question, subject = self.question(body, proof), self.subject(nats.namespace)
        absent = self.absent.format(repr(nats.namespace))
        answer = await answer_of(self.who, nats, subject, question, self.decode, timeout_s, absent)
        if not isinstance(answer, kind):
            raise ProtocolError(self.who, f"answered with {type(answer).__name__} and not {kind.__name__}")
        return answer

    async def order(
        self, nats: NatsClient, order: Struct, kind: type[K], timeout_s: float, challenge: str, key: Secret | None
    ) -> K:
        """`challenge`: of its last answer."""
        proof = "" if key is None else prove(key.reveal(), challenge, order)
        return await self.ask(nats, order, kind, timeout_s, proof)
