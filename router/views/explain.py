"""Why a request went where it went, and where a prompt would go now: `baton events explain`. Asked by grpc_admin.

Nothing here changes anything: a prompt that is asked about is weighed as a request would be, and not charged.
"""

import time

import numpy as np
from numpy.typing import NDArray

from baton_proto.generated import inference_pb2 as pb
from router.placement.assignment import Assigner
from router.placement.decisions import Decision, DecisionLog
from router.placement.placement import NO_ROOM, Cost, Request, Weighing, chances
from router.workers.pool import PooledWorker, WorkerPool
from runtime.blocks.block_hash import block_hashes
from runtime.config.serving import RouterConfig
from runtime.discovery.worker_key import WorkerKey


class Explainer:
    def __init__(
        self, assigner: Assigner, decisions: DecisionLog, pool: WorkerPool, config: RouterConfig, block_size: int
    ) -> None:
        self._assigner = assigner
        self._decisions = decisions
        self._pool = pool
        self._config = config
        self._block_size = block_size

    def request(self, request_id: str) -> pb.ExplainResponse | None:
        """None: it is not remembered."""
        decisions, others = self._decisions.of(request_id)
        if not decisions:
            return None
        messages = [self._remembered(decision) for decision in decisions]
        return pb.ExplainResponse(decisions=messages, rules=self._rules(), other_requests=others)

    def prompt(self, tokens: NDArray[np.uint32]) -> pb.ExplainResponse:
        """Where it would go if it came now, with one token to generate."""
        facts = Request(len(tokens), self._block_size)
        weighing = self._assigner.weigh(facts, len(tokens) + 1, block_hashes(tokens, self._block_size))
        decision = self._decision(facts, weighing.costs())
        placement = weighing.placement()
        if placement is None:
            decision.reason = _why_it_waits(weighing)
        else:
            decision.reason = placement.reason
            _mark_chosen(decision, placement.decode, placement.prefill)
        decision.left_out.extend(self._left_out(decision, len(tokens) + 1))
        return pb.ExplainResponse(decisions=[decision], rules=self._rules())

    @property
    def num_remembered(self) -> int:
        return len(self._decisions)

    def _remembered(self, decision: Decision) -> pb.Decision:
        placement = decision.placement
        message = self._decision(decision.request, placement.costs)
        message.request_id = decision.request_id
        message.choice, message.attempt = decision.choice, decision.attempt
        message.age_s, message.waited_s = time.monotonic() - decision.at_s, decision.waited_s
        message.reason = placement.reason
        _mark_chosen(message, placement.decode, placement.prefill)
        return message

    def _decision(self, request: Request, costs: list[Cost]) -> pb.Decision:
        message = pb.Decision(num_tokens=request.num_tokens)
        for role in ("prefill", "decode"):
            weighed = [cost for cost in costs if cost.role == role]
            for cost, chance in zip(weighed, chances(weighed, self._config.placement.temperature), strict=True):
                message.candidates.append(_candidate(request, cost, chance))
        return message

    def _left_out(self, decision: pb.Decision, num_tokens: int) -> list[pb.LeftOut]:
        weighed = {candidate.worker_id for candidate in decision.candidates}
        return [
            pb.LeftOut(worker_id=worker_id, role=worker.record.role, reason=self._why_left_out(worker, num_tokens))
            for worker_id, worker in sorted(self._pool.workers.items())
            if worker_id not in weighed
        ]

    def _why_left_out(self, worker: PooledWorker, num_tokens: int) -> str:
        record = worker.record
        if worker.misfit:
            return worker.misfit
        if record.state != "ready":
            return f"is {record.state}"
        if not worker.usable:
            return "the router cannot reach it"
        needed = num_tokens if record.role == "decode" else num_tokens - 1
        if record.max_model_len < needed:
            return f"takes {record.max_model_len} tokens at most"
        return "no decode worker could take the request"

    def _rules(self) -> pb.PlacementRules:
        placement = self._config.placement
        return pb.PlacementRules(
            block_size=self._block_size,
            overlap_weight=placement.overlap_weight,
            prefill_weight=placement.prefill_weight,
            load_weight=placement.load_weight,
            mixed_overlap_weight=placement.mixed_overlap_weight,
            mixed_load_weight=placement.mixed_load_weight,
            eviction_weight=placement.eviction_weight,
            transfer_weight=placement.transfer_weight,
            temperature=placement.temperature,
            local_prefill_tokens=placement.local_prefill_tokens,
            local_prefill_requests=placement.local_prefill_requests,
            local_prefill_when_full=placement.local_prefill_when_full,
            prefill_queue_tokens=placement.prefill_queue_tokens,
            attention_tokens=placement.attention_tokens,
            max_running_per_worker=self._config.max_running_per_worker,
        )


def _candidate(request: Request, cost: Cost, chance: float) -> pb.CandidateCost:
    """The cost, term by term; where the prompt does not run, its queue costs nothing and its cache saves transfer."""
    weights = cost.weights
    runs = weights.prefill if cost.runs_prompt else 0.0
    shipped_blocks = 0 if cost.runs_prompt else cost.prompt_blocks - cost.cached_blocks
    return pb.CandidateCost(
        worker_id=cost.worker[0],
        incarnation=cost.worker[1],
        role=cost.role,
        prompt_blocks=cost.prompt_blocks,
        cached_blocks=cost.cached_blocks,
        queued_prefill_tokens=cost.queued_tokens,
        active_blocks=cost.active_blocks,
        uncached_tokens=request.num_tokens - cost.cached_blocks * request.block_size,
        runs_prompt=cost.runs_prompt,
        prompt_term=weights.prefill * cost.prompt_work,
        cached_term=0.0 - runs * weights.overlap * cost.cached_work,  # never -0.0
        queued_term=runs * cost.queued_work,
        transfer_term=weights.transfer * shipped_blocks,
        load_term=weights.load * cost.active_blocks,
        eviction_term=weights.eviction * cost.stored_blocks if cost.runs_prompt else 0.0,
        overlap_weight=weights.overlap,
        total=cost.total,
        barred=cost.barred,
        chance=chance,
    )


def _why_it_waits(weighing: Weighing) -> str:
    decode = weighing.decode.costs()
    if not decode:
        return "it would wait: no decode worker that can take it is ready"
    if all(cost.barred == NO_ROOM for cost in decode):
        return "it would wait: every decode worker has its limit of requests"
    return "it would wait: every prefill worker has its fill of queued prompts, and no decode worker may run one"


def _mark_chosen(decision: pb.Decision, decode: WorkerKey, prefill: WorkerKey | None) -> None:
    decision.decode_worker = decode[0]
    decision.prefill_worker = prefill[0] if prefill else ""
    for candidate in decision.candidates:
        chosen = decode if candidate.role == "decode" else prefill
        candidate.chosen = (candidate.worker_id, candidate.incarnation) == chosen
