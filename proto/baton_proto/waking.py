"""A router's question to the supervisor to wake the workers of a model, and its answer: request and reply on
`baton.<namespace>.wake` in the model's namespace, core NATS."""

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from baton_proto.decoding import Count, Ms, Text, versioned
from baton_proto.orders import Refusal

MAJOR = 1


class Question(Struct, frozen=True):
    version: Count
    timeout_s: Ms  # for which requests wait


class Outcome(Struct, frozen=True, tag="outcome"):
    """`awake`: a decode worker is ready. `none`: no worker of the model sleeps. `busy`: others hold its GPUs.
    `failed`: its workers sleep on. `problem`: the reason of the last two."""

    state: Literal["awake", "none", "busy", "failed"]
    problem: Text = ""


class Answer(Struct, frozen=True):
    version: Count
    body: Outcome | Refusal


encode: Callable[[Question | Answer], bytes] = msgspec.json.Encoder().encode
decode_question = versioned(Question, "question to wake a model", MAJOR, json=True)
decode_answer = versioned(Answer, "answer to a question to wake a model", MAJOR, json=True)
