"""The last requests in a line each, and the story of one: where it went, why, and when it passed what."""

import time
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from msgspec import structs

from baton_proto.generated import inference_pb2 as pb
from baton_proto.placement_words import BARRED, REASONS
from baton_proto.token_counts import TokenCounts
from router.counters.recent import Recent, RecentRequest, Service
from router.views.explain import Explainer
from router.views.hops import Hop, hops

LISTED: Final = 40
CANDIDATES: Final = 12  # of each role in a story: the cheapest ones, and the chosen one


class RequestLine(TokenCounts, kw_only=True):
    request_id: str
    time_s: float  # of its arrival, Unix
    prefill_worker: str  # of its first choice; empty: the decode worker ran the prompt, or nobody did yet
    decode_worker: str
    ttft_ms: float | None
    duration_ms: float | None  # None: it runs
    outcome: str
    key: str  # the name of its caller's; empty: none is asked for


class RequestViews:
    def __init__(self, recent: Recent, explainer: Explainer) -> None:
        self._recent = recent
        self._explainer = explainer
        self._epoch_s = time.time() - time.monotonic()

    def lines(self) -> list[RequestLine]:
        """The newest first."""
        return [self._line(request) for request in islice(reversed(self._recent.requests), LISTED)]

    def story(self, request_id: str) -> dict[str, Any] | None:
        """`request_id`: as the caller named it, which means its latest request, or as the log does. None: not
        remembered. Times are in ms since the arrival."""
        found = self._recent.find(request_id)
        if found is None:
            return None
        explained = self._explainer.request(found.request_id)
        return {
            "line": self._line(found),
            "choices": [_hops(found, choice) for choice in found.choices],
            "placements": [_placement(found, one) for one in explained.decisions] if explained else [],
            "hops": [_bar(found, hop) for hop in hops(found, time.monotonic())],
            "terms": [term.heading for term in explained.rules.terms] if explained else [],
        }

    def _line(self, request: RecentRequest) -> RequestLine:
        first = request.choices[0] if request.choices else Service(0)
        return RequestLine(
            **structs.asdict(request.tokens),
            request_id=request.request_id,
            time_s=round(self._epoch_s + request.arrived_s, 3),
            prefill_worker=first.prefill_worker,
            decode_worker=first.decode_worker,
            ttft_ms=_ms(first.first_s - request.arrived_s) if first.tokens.output_tokens else None,
            duration_ms=_ms(request.ended_s - request.arrived_s) if request.outcome else None,
            outcome=request.outcome,
            key=request.key,
        )


def _hops(request: RecentRequest, choice: Service) -> Mapping[str, object]:
    return {
        "index": choice.index,
        "attempts": choice.attempts,
        "first_ms": _ms(choice.first_s - request.arrived_s) if choice.tokens.output_tokens else None,
        "last_ms": _ms(choice.last_s - request.arrived_s),
        **structs.asdict(choice.tokens),
        "accepted_tokens": choice.accepted_tokens,
        "kv_blocks": choice.kv_blocks,
        "kv_bytes": choice.kv_bytes,
        "transport": choice.transport,
    }


def _bar(request: RecentRequest, hop: Hop) -> Mapping[str, object]:
    fields = structs.asdict(hop)
    began_s, ended_s = fields.pop("began_s"), fields.pop("ended_s")
    return fields | {"from_ms": _ms(began_s - request.arrived_s), "to_ms": _ms(ended_s - request.arrived_s)}


def _placement(request: RecentRequest, decision: pb.Decision) -> Mapping[str, object]:
    tried = (one for choice in request.choices if choice.index == decision.choice for one in choice.tried)
    stamped_s = next((one.placed_s for one in tried if one.number == decision.attempt), 0.0)
    placed_ms = _ms((stamped_s or time.monotonic() - decision.age_s) - request.arrived_s)
    shown = []
    for role in ("prefill", "decode"):
        of_role = sorted((c for c in decision.candidates if c.role == role), key=lambda c: (not c.chosen, c.total))
        shown += of_role[:CANDIDATES]
    return {name: getattr(decision, name) for name in ("choice", "attempt", "prefill_worker", "decode_worker")} | {
        "reason": REASONS[decision.reason],
        "queued_ms": round(placed_ms - decision.waited_s * 1e3, 2),
        "placed_ms": placed_ms,
        "weighed": len(decision.candidates),
        "candidates": [
            {name: getattr(one, name) for name in ("worker_id", "role", "total", "chance", "chosen")}
            | {"barred": BARRED[one.barred], "terms": [term.value for term in one.terms]}
            for one in shown
        ],
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
