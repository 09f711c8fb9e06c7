"""Why a request went where it went, and where a prompt would go now: `baton events explain`. Asked by grpc_admin.

Nothing here changes anything: a prompt that is asked about is weighed as a request would be, and not charged.
"""

import time

import numpy as np
from numpy.typing import NDArray

from baton.config import PlacementConfig, RouterConfig
from baton_proto.generated import inference_pb2 as pb
from router.assignment import Assigner
from router.block_hash import block_hashes
from router.decisions import Decision, DecisionLog
from router.match import WorkerKey
from router.placement import Cost, Request, Weighing, chances
from router.worker_pool import PooledWorker, WorkerPool


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
        weighing, full = self._assigner.weigh(facts, len(tokens) + 1, block_hashes(tokens, self._block_size))
        decision = self._decision(facts, weighing.prefill + weighing.decode)
        placement = weighing.placement()
        if placement is None:
            decision.reason = self._why_it_waits(weighing, full)
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
        message.left_out.extend(
            pb.LeftOut(worker_id=worker[0], role="decode", reason=self._no_room()) for worker in decision.full
        )
        return message

    def _decision(self, request: Request, costs: list[Cost]) -> pb.Decision:
        message = pb.Decision(num_tokens=request.num_tokens)
        for role in ("prefill", "decode"):
            weighed = [cost for cost in costs if cost.role == role]
            for cost, chance in zip(weighed, chances(weighed, self._config.placement.temperature), strict=True):
                message.candidates.append(_candidate(request, cost, chance, self._config.placement))
        return message

    def _why_it_waits(self, weighing: Weighing, full: list[WorkerKey]) -> str:
        if weighing.decode:
            return "it would wait: every prefill worker has its fill of queued prompts"
        if full:
            return "it would wait: every decode worker has its limit of requests"
        return "it would wait: no decode worker that can take it is ready"

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
        return self._no_room() if record.role == "decode" else "no decode worker could take the request"

    def _no_room(self) -> str:
        return f"has its limit of {self._config.max_running_per_worker} requests"

    def _rules(self) -> pb.PlacementRules:
        placement = self._config.placement
        return pb.PlacementRules(
            block_size=self._block_size,
            overlap_weight=placement.overlap_weight,
            prefill_weight=placement.prefill_weight,
            load_weight=placement.load_weight,
            transfer_weight=placement.transfer_weight,
            temperature=placement.temperature,
            local_prefill_tokens=placement.local_prefill_tokens,
            local_prefill_requests=placement.local_prefill_requests,
            prefill_queue_tokens=placement.prefill_queue_tokens,
            max_running_per_worker=self._config.max_running_per_worker,
        )


def _candidate(request: Request, cost: Cost, chance: float, config: PlacementConfig) -> pb.CandidateCost:
    """The cost, term by term; where the prompt does not run, its queue costs nothing and its cache saves transfer."""
    runs = config.prefill_weight if cost.runs_prompt else 0.0
    shipped_blocks = 0 if cost.runs_prompt else cost.prompt_blocks - cost.cached_blocks
    return pb.CandidateCost(
        worker_id=cost.worker[0],
        incarnation=cost.worker[1],
        role=cost.role,
        prompt_blocks=cost.prompt_blocks,
        cached_blocks=cost.cached_blocks,
        queued_prefill_tokens=round(cost.queued_blocks * request.block_size),
        active_blocks=cost.active_blocks,
        uncached_tokens=request.num_tokens - cost.cached_blocks * request.block_size,
        runs_prompt=cost.runs_prompt,
        prompt_term=config.prefill_weight * cost.prompt_blocks,
        cached_term=0.0 - runs * config.overlap_weight * cost.cached_blocks,  # never -0.0
        queued_term=runs * cost.queued_blocks,
        transfer_term=config.transfer_weight * shipped_blocks,
        load_term=config.load_weight * cost.active_blocks,
        total=cost.total,
        barred=cost.barred,
        chance=chance,
    )


def _mark_chosen(decision: pb.Decision, decode: WorkerKey, prefill: WorkerKey | None) -> None:
    decision.decode_worker = decode[0]
    decision.prefill_worker = prefill[0] if prefill else ""
    for candidate in decision.candidates:
        chosen = decode if candidate.role == "decode" else prefill
        candidate.chosen = (candidate.worker_id, candidate.incarnation) == chosen
