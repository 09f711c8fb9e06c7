"""One request's spans: the request with its tokens, and below it a span per hop. Names of attributes follow
OpenTelemetry's conventions for generative AI where there is one; the others begin with `baton.`."""

from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import astuple

from router.counters.recent import RecentRequest
from router.views.hops import Hop, hops

USAGE = (  # attributes that tell TOKEN_COUNTS
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.output_tokens",
)
FACTS = {  # fields of a hop -> attributes, where the field has a value
    "worker": "baton.worker",
    "tokens": "baton.tokens",
    "kv_bytes": "baton.kv.bytes",
    "layers": "baton.kv.layers",
    "gb_per_s": "baton.kv.gb_per_s",
    "transport": "baton.kv.transport",
    "off_by_ms": "baton.time.off_by_ms",
}


class SpanMaker(Protocol):
    def child(
        self, parent: Any, name: str, attributes: dict[str, Any], began_ns: int, ended_ns: int, problem: str
    ) -> Any:
        """Makes a span that has ended. `parent`, and what is returned: what names a span to its children."""


def add_spans(
    maker: SpanMaker, call: Any, request: RecentRequest, facts: dict[str, Any], nanoseconds: Callable[[float], int]
) -> None:
    """Makes the spans of a request that has ended, below the call's. `facts`: attributes of the request's own span.
    `nanoseconds`: of a monotonic time."""

    def child(name: str, attributes: dict[str, Any], began_s: float, ended_s: float, problem: str) -> None:
        above.append(maker.child(above[-1], name, attributes, nanoseconds(began_s), nanoseconds(ended_s), problem))

    above = [call]
    problem = "" if request.outcome in ("completed", "cancelled") else request.outcome
    child("generate", facts | _request_facts(request), request.arrived_s, request.ended_s, problem)
    for hop in hops(request, request.ended_s):
        del above[hop.depth + 2 :]
        child(hop.name, _hop_facts(hop), hop.began_s, hop.ended_s, hop.problem)


def _request_facts(request: RecentRequest) -> dict[str, Any]:
    return {
        "gen_ai.provider.name": "baton",
        "gen_ai.request.choice.count": len(request.choices),
        **dict(zip(USAGE, astuple(request.tokens), strict=True)),
        "baton.accepted_tokens": sum(choice.accepted_tokens for choice in request.choices),
        "baton.request_id": request.request_id,
        "baton.outcome": request.outcome,
    }


def _hop_facts(hop: Hop) -> dict[str, Any]:
    facts = {name: value for field, name in FACTS.items() if (value := getattr(hop, field))}
    if hop.depth == 0:
        facts |= {"baton.choice": hop.choice, "baton.attempt": hop.attempt}
    return facts
