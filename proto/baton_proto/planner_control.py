"""Questions to a running planner and its answers: request and reply on `baton.<namespace>.planner`, core NATS.

The answer to an order comes when the effect begins, not when it ends: `baton plan` shows effects in flight.
"""

import hashlib
import hmac
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from baton_proto.decoding import Count, decoder
from baton_proto.planner import Holds, Observation, Role, Target, Verb
from baton_proto.version import check_major

MAJOR = 1

Challenge = Annotated[str, Meta(max_length=64)]
"""What the next order has to prove its key over; a new one after each order."""

Proof = Annotated[str, Meta(max_length=64)]
"""HMAC-SHA256 over the challenge of the last Plan and the encoded order, by an operator key; hexadecimal."""


class ShowPlan(Struct, frozen=True, tag="show"):
    pass


class Scale(Struct, frozen=True, tag="scale"):
    """Sets counts by hand, which override the policy's; None leaves a role as it was."""

    prefill: Count | None = None
    decode: Count | None = None


class Release(Struct, frozen=True, tag="release"):
    """Releases the counts set by hand: the planner decides alone again."""


class Order(Struct, frozen=True, tag="order"):
    """Begins one effect at once."""

    verb: Literal["drain", "flip"]
    worker_id: str


class Question(Struct, frozen=True):
    """An order carries a proof that its sender has an operator key: see `Proof`."""

    version: Count
    body: ShowPlan | Scale | Release | Order
    proof: Proof = ""


class InFlight(Struct, frozen=True):
    """An effect that has begun and has not ended."""

    verb: Verb
    worker_id: str
    role: Role
    running_s: float


class Plan(Struct, frozen=True, tag="plan"):
    """The last decision and the effects in flight."""

    age_s: float | None  # of the decision; None: no decision yet
    observation: Observation | None  # without its timed steps
    target: Target | None
    effects: list[InFlight]
    holds: Holds
    problem: str = ""  # why the last step observed nothing; empty when it did
    metrics_address: str = ""  # HOST:PORT of the Prometheus endpoint
    challenge: Challenge = ""


class Done(Struct, frozen=True, tag="done"):
    sentence: str


class Refusal(Struct, frozen=True, tag="refused"):
    field: str
    problem: str


class Answer(Struct, frozen=True):
    version: Count
    body: Plan | Done | Refusal


_encoder = msgspec.json.Encoder()
_decode_question = decoder(Question, json=True)
_decode_answer = decoder(Answer, json=True)


def encode(message: Question | Answer) -> bytes:
    return _encoder.encode(message)


def prove(key: str, challenge: str, order: Scale | Release | Order) -> str:
    """The proof that belongs to an order."""
    return hmac.new(key.encode(), challenge.encode() + _encoder.encode(order), hashlib.sha256).hexdigest()


def decode_question(data: bytes) -> Question:
    """Raises msgspec.DecodeError."""
    question: Question = _decode_question(data)
    check_major("question to the planner", question.version, MAJOR)
    return question


def decode_answer(data: bytes) -> Answer:
    """Raises msgspec.DecodeError."""
    answer: Answer = _decode_answer(data)
    check_major("answer of the planner", answer.version, MAJOR)
    return answer
