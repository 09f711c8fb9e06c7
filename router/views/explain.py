"""Why a request went where it went, what it passed when, and where a prompt would go now: `baton events explain`.

A prompt that is asked about is weighed like a request but not charged: the question changes no state.
"""

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from msgspec import structs
from numpy.typing import NDArray

from baton_proto.generated import inference_pb2 as pb
from router.counters.recent import Recent, RecentRequest
from router.placement import cost
from router.placement.assignment import Assigner
from router.placement.candidates import Cost, Request, chances
from router.placement.decisions import Decision, DecisionLog
from router.placement.placement import Placement, Weighing
from router.placement.weights import Weights
from router.siblings import Siblings
from router.views.hops import hops
from router.workers.pool import PooledWorker, WorkerPool
from runtime.blocks.block_hash import SEED, lora_seed
from runtime.blocks.xxh3 import block_hashes
from runtime.config.serving import RouterConfig

QUESTION = "explain"
SETTINGS = ("prefill_queue_tokens", "local_prefill_tokens")  # that the answer repeats
KNOBS = (*(term.key for term in cost.TERMS if term.key), "ship_ms", "delay_weight", "crowd_weight", "keep_steps")


@dataclass(frozen=True, slots=True)
class Explainer:
    assigner: Assigner
    decisions: DecisionLog
    recent: Recent
    pool: WorkerPool
    config: RouterConfig
    block_size: int
    siblings: Siblings

    async def start(self) -> None:
        async def answer(request_id: bytes) -> bytes:
            response = self.request(request_id.decode())
            return b"" if response is None else response.SerializeToString()

        await self.siblings.answer(QUESTION, answer)

    async def request_anywhere(self, request_id: str) -> pb.ExplainResponse | None:
        """The decisions of whichever router remembers the request."""
        if (response := self.request(request_id)) is not None:
            return response
        for answer in await self.siblings.ask(QUESTION, request_id.encode()):
            with contextlib.suppress(DecodeError):
                return pb.ExplainResponse.FromString(answer)
        return None

    def request(self, request_id: str) -> pb.ExplainResponse | None:
        """The remembered decisions for the request; None when none is remembered."""
        decisions, others = self.decisions.of(request_id)
        if not decisions:
            return None
        found = self.recent.find(decisions[0].request_id)
        messages = [self._remembered(decision, found) for decision in decisions]
        timeline = _timeline(found) if found is not None else []
        return pb.ExplainResponse(decisions=messages, rules=self._rules(), other_requests=others, hops=timeline)

    def prompt(self, tokens: NDArray[np.uint32], hash_seed: int = SEED, adapter: str = "") -> pb.ExplainResponse:
        """Where a request with this prompt and one token to generate would go now."""
        facts = Request(len(tokens), self.block_size, adapter=adapter)
        weighing = self.assigner.weigh(
            facts, len(tokens) + 1, block_hashes(tokens, self.block_size, lora_seed(adapter, hash_seed))
        )
        decision = self._decision(facts, weighing, weighing.placement())
        decision.left_out.extend(self._left_out(decision, len(tokens) + 1, adapter))
        return pb.ExplainResponse(decisions=[decision], rules=self._rules())

    @property
    def num_remembered(self) -> int:
        return len(self.decisions)

    def _remembered(self, decision: Decision, request: RecentRequest | None) -> pb.Decision:
        message = self._decision(decision.request, decision.weighing, decision.placement)
        if decision.placement is None:
            message.reason, message.expected_ms = pb.PLACEMENT_REASON_TOO_LATE, decision.expected_ms
        message.request_id = decision.request_id
        message.choice, message.attempt = decision.choice, decision.attempt
        message.age_s, message.waited_s = time.monotonic() - decision.at_s, decision.waited_s
        tried = [] if request is None else [(one.index, attempt) for one in request.choices for attempt in one.tried]
        for index, attempt in tried:
            if (index, attempt.number) == (decision.choice, decision.attempt) and attempt.first_s:
                message.took_ms = (attempt.first_s - attempt.placed_s) * 1e3
        return message

    def _decision(self, request: Request, weighing: Weighing, placement: Placement | None) -> pb.Decision:
        message = pb.Decision(num_tokens=request.num_tokens)
        chosen = []
        if placement is None:
            message.reason = _why_it_waits(weighing)
        else:
            chosen = [placement.decode, placement.prefill]
            message.reason, message.decode_worker = placement.reason, placement.decode[0]
            message.prefill_worker = placement.prefill[0] if placement.prefill else ""
            message.expected_ms = placement.ttft_ms
        for weighed, costs in zip((weighing.prefill, weighing.decode), weighing.costs_by_role(), strict=True):
            odds = chances(costs, weighed.due_ms)
            if weighing.keeps and weighed is weighing.decode:
                odds = [0.0] * len(odds)
            for one, chance in zip(costs, odds, strict=True):
                message.candidates.append(_candidate(request, one, chance, one.worker in chosen))
        return message

    def _left_out(self, decision: pb.Decision, num_tokens: int, adapter: str) -> list[pb.LeftOut]:
        weighed = {candidate.worker_id for candidate in decision.candidates}
        return [
            _left_out(worker, num_tokens, adapter)
            for worker_id, worker in sorted(self.pool.workers.items())
            if worker_id not in weighed
        ]

    def _rules(self) -> pb.PlacementRules:
        return pb.PlacementRules(
            block_size=self.block_size,
            max_running_per_worker=self.config.max_running_per_worker,
            **{name: getattr(self.assigner.weights, name) for name in SETTINGS},
            **term_rules(self.assigner.weights),
        )


def _timeline(request: RecentRequest) -> list[pb.Hop]:
    messages = []
    for hop in hops(request, time.monotonic()):
        fields = structs.asdict(hop)
        began_s, ended_s = fields.pop("began_s"), fields.pop("ended_s")
        times = {"from_ms": (began_s - request.arrived_s) * 1e3, "to_ms": (ended_s - request.arrived_s) * 1e3}
        messages.append(pb.Hop(**times, **fields))
    return messages


def term_rules(config: Weights) -> dict[str, Any]:
    """The fields of PlacementRules that follow from the table of terms."""
    terms = [pb.TermRule(name=row.name, heading=row.heading, amount=row.meaning, key=row.key) for row in cost.TERMS]
    return {"weights": {key: getattr(config, key) for key in KNOBS}, "terms": terms}


def _left_out(worker: PooledWorker, num_tokens: int, adapter: str) -> pb.LeftOut:
    record = worker.record
    needed = num_tokens if record.role == "decode" else num_tokens - 1
    reason, detail = pb.LEFT_OUT_REASON_NO_DECODE, ""
    if worker.misfit:
        reason, detail = pb.LEFT_OUT_REASON_MISFIT, worker.misfit
    elif record.state != "ready":
        reason, detail = pb.LEFT_OUT_REASON_NOT_READY, record.state
    elif not worker.usable:
        reason = pb.LEFT_OUT_REASON_UNREACHABLE
    elif adapter and adapter not in record.adapters:
        reason, detail = pb.LEFT_OUT_REASON_MISFIT, f"has no adapter {adapter!r}"
    elif record.max_model_len < needed:
        reason, detail = pb.LEFT_OUT_REASON_TOO_SMALL, str(record.max_model_len)
    return pb.LeftOut(worker_id=record.worker_id, role=record.role, reason=reason, detail=detail)


def _candidate(request: Request, weighed: Cost, chance: float, chosen: bool) -> pb.CandidateCost:
    return pb.CandidateCost(
        worker_id=weighed.worker[0],
        incarnation=weighed.worker[1],
        role=weighed.role,
        prompt_blocks=weighed.prompt_blocks,
        cached_blocks=weighed.cached_blocks,
        queued_prefill_tokens=weighed.queued_tokens,
        active_blocks=weighed.active_blocks,
        uncached_tokens=request.num_tokens - weighed.cached_blocks * request.block_size,
        runs_prompt=weighed.runs_prompt,
        terms=[pb.CostTerm(name=term.name, value=value) for term, value in zip(cost.TERMS, weighed.terms, strict=True)],
        **dict(zip(("host_blocks", "disk_blocks"), weighed.lower_blocks, strict=False)),
        total=weighed.total,
        ttft_ms=weighed.ttft_ms,
        barred=weighed.barred,
        chance=chance,
        chosen=chosen,
    )


def _why_it_waits(weighing: Weighing) -> "pb.PlacementReason":
    decode = weighing.decode.costs()
    if not decode:
        return pb.PLACEMENT_REASON_WAITS_FOR_DECODE
    if all(weighed.barred == cost.NO_ROOM for weighed in decode):
        return pb.PLACEMENT_REASON_WAITS_FOR_DECODE_ROOM
    return pb.PLACEMENT_REASON_WAITS_FOR_PREFILL_ROOM
