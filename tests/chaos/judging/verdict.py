"""What a request's outcome is worth, given the oracle's answer and who could serve meanwhile. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from router.requests.choice import MAX_DEATHS
from tests.chaos import grammars
from tests.chaos.judging.timeline import Timeline
from tests.chaos.plan import Ask

OWN_FAULTS = ("INTERNAL", "UNKNOWN", "500")  # no loss of a worker or router explains these


class Verdict(StrEnum):
    EXACT = "exact"
    VALID = "valid and exact"  # of a whole answer with a grammar
    LEFT = "left, exact so far"
    WARRANTED = "warranted errors"
    UNWARRANTED = "unwarranted errors"
    WRONG = "wrong"
    CROSSED = "of another model"
    HUNG = "hung"


FAILURES = (Verdict.UNWARRANTED, Verdict.WRONG, Verdict.CROSSED, Verdict.HUNG)


@dataclass(slots=True)
class Outcome:
    """`tokens` are known over gRPC alone. Times are those of time.monotonic()."""

    ask: Ask
    router: str
    start_s: float
    end_s: float = 0.0
    end: Literal["done", "left", "error", "hung"] = "hung"
    tokens: list[int] | None = None
    text: str = ""
    finish: str = ""
    code: str = ""
    details: str = ""
    last_id: str = ""  # of an event
    may_resume: bool = False  # the client has what it takes to go on at another router


@dataclass(frozen=True, slots=True)
class Expected:
    """`open`: the next token is one of two whose logits are closer than float32 tells; any of them may follow."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""  # "stop" | "length"
    open: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    verdict: Verdict
    why: str = ""


def judge(
    outcome: Outcome,
    expected: Expected,
    timeline: Timeline,
    decode: list[str],
    workers: list[str],
    routers: list[str] | None = None,
) -> Judged:
    """`decode`, `workers`: the names, as this request's router sees them. `routers`: those that share the port that was
    asked; None: it was asked itself."""
    if outcome.end == "hung":
        return Judged(Verdict.HUNG, "no end long after its deadline")
    if difference := _difference(outcome, expected):
        return Judged(Verdict.WRONG, difference)
    if outcome.end == "done":
        return _whole(outcome)
    if outcome.end == "left":
        return Judged(Verdict.LEFT)
    said = f"{outcome.code}: {outcome.details}"
    why = _warrant(outcome, timeline, decode, workers, routers)
    if why is None or (outcome.code in OWN_FAULTS and why != ROUTER_LOST):
        return Judged(Verdict.UNWARRANTED, said)
    return Judged(Verdict.WARRANTED, why)


def judge_any(
    outcome: Outcome,
    rights: list[tuple[Expected, list[str]]],
    timeline: Timeline,
    workers: list[str],
    routers: list[str] | None = None,
) -> Judged:
    """Judges an answer that may be of any generation, but wholly of one. `rights`: of each, what is right and the
    decode workers that could go on with it."""
    found = [judge(outcome, right, timeline, decode, workers, routers) for right, decode in rights]
    return min(found, key=lambda one: (one.verdict in FAILURES, one.verdict is Verdict.WRONG))


def is_crossed(outcome: Outcome, others: list[Expected]) -> bool:
    """Whether a wrong answer is one that another model gives."""
    return any(not _difference(outcome, other) for other in others)


def _whole(outcome: Outcome) -> Judged:
    """Judges an answer that is exact, as far as the oracle can tell."""
    grammar = outcome.ask.grammar
    if grammar is None:
        return Judged(Verdict.EXACT)
    if outcome.finish == "stop" and (why := grammars.mismatch(grammar, outcome.text)):
        return Judged(Verdict.WRONG, why)
    return Judged(Verdict.VALID)


FROZEN_S = 10.0  # for so long the system hands connections to a router that hangs
ROUTER_LOST = "its router was struck"


def _warrant(
    outcome: Outcome, timeline: Timeline, decode: list[str], workers: list[str], routers: list[str] | None
) -> str | None:
    start_s, end_s = outcome.start_s, outcome.end_s
    if routers is None and timeline.gap([outcome.router], start_s, end_s):
        return ROUTER_LOST
    if routers is not None and not outcome.may_resume:
        lost = timeline.losses(routers, start_s - FROZEN_S, end_s)
        if lost or timeline.gap(routers, start_s, end_s):
            return ROUTER_LOST
    if timeline.gap(decode, start_s, end_s):
        return "no decode worker was able"
    if timeline.losses(workers, start_s, end_s) >= MAX_DEATHS:
        return f"workers were lost {MAX_DEATHS} times meanwhile"
    return None


def _difference(outcome: Outcome, expected: Expected) -> str:
    """Empty when all that was said is right. A whole answer has to be equal, another one a beginning."""
    whole = outcome.end == "done" and not expected.open
    if outcome.tokens is not None:
        heard, right = outcome.tokens, expected.tokens
        place = next((at for at, pair in enumerate(zip(heard, right, strict=False)) if pair[0] != pair[1]), None)
        if place is not None:
            return f"token {place} is {heard[place]}, not {right[place]}; prompt of {len(outcome.ask.prompt)} tokens"
        most = outcome.ask.sampling["max_tokens"] if expected.open else len(right)
        may_end = expected.open and outcome.finish == "stop" and outcome.ask.grammar is not None
        if len(heard) > most or (outcome.end == "done" and len(heard) < most and not may_end):
            return f"{len(heard)} tokens, not {most}"
    if whole and expected.finish != outcome.finish:
        return f"ended by {outcome.finish!r}, not {expected.finish!r}"
    if expected.open and outcome.text.startswith(expected.text):
        return ""
    if (outcome.text != expected.text) if whole else not expected.text.startswith(outcome.text):
        return f"text {outcome.text!r}, not {expected.text!r}"
    return ""
