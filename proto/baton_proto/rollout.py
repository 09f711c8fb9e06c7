"""Questions to the supervisor of a running service and its answers: request and reply on
`baton.<namespace>.supervisor`, core NATS.

The answer to an order comes when the roll-out begins, not when it ends: `ShowService` asks how far it is.
"""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Struct

from baton_proto.decoding import Count, Name, Rows, Text, versioned
from baton_proto.orders import Challenge, Proof, Refusal

MAJOR = 1

Settings = Annotated[dict[Name, Any], Rows]
"""Any part of serving.yaml, as plain data."""


class Code(Struct, frozen=True):
    """An installation of Baton, at the same place on each machine of the service."""

    version: Name
    python: Text = ""  # the interpreter
    paths: Annotated[tuple[Text, ...], Rows] = ()  # folders that its packages lie in


class ShowService(Struct, frozen=True, tag="show"):
    seen: Count = 0  # news of the roll-out that the asker has


class Rollout(Struct, frozen=True, tag="rollout"):
    """Makes the service what is wanted. `given` None: the configuration that runs. `served_model`: whose `settings`
    are, where several are served; empty: the service's. `dry_run`: only says how."""

    given: Settings | None
    settings: Settings  # which go before `given`, and before the options that the service was started with
    code: Code
    dry_run: bool = False
    served_model: Text = ""


class Back(Struct, frozen=True, tag="back"):
    """Makes the service what it was before the last roll-out."""

    dry_run: bool = False


class Question(Struct, frozen=True):
    """An order carries a proof that its sender has an operator key: see orders.py."""

    version: Count
    body: ShowService | Rollout | Back
    proof: Proof = ""


class Row(Struct, frozen=True):
    """What happens to one process, in words."""

    process: Name
    what: Text
    why: Text


class News(Struct, frozen=True):
    """`line` is for people, `event` and `fields` are for programs."""

    line: Text
    event: Name
    fields: Annotated[dict[Name, Any], Rows]


class ServiceView(Struct, frozen=True, tag="service"):
    """The service, and its last roll-out or the one under way."""

    running: Settings  # the configuration that runs
    options: Settings  # that the service was started with, which go before a file
    code: Name  # its version
    news: Annotated[list[News], Rows] = []
    under_way: bool = False
    problem: Text = ""  # why the last roll-out failed
    challenge: Challenge = ""


class Planned(Struct, frozen=True, tag="planned"):
    """Empty rows: nothing changes."""

    rows: Annotated[list[Row], Rows]


class Answer(Struct, frozen=True):
    version: Count
    body: ServiceView | Planned | Refusal


encode: Callable[[Question | Answer], bytes] = msgspec.json.Encoder().encode
decode_question = versioned(Question, "question to the supervisor", MAJOR, json=True)
decode_answer = versioned(Answer, "answer of the supervisor", MAJOR, json=True)
